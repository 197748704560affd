"""A decoder with a feed-forward block of its own: squared ReLU, without a gate."""

from torch import Tensor, nn

from raypp.job.models import DecoderOptions
from raypp.stages.models.layers import Attention, DecoderLayer
from raypp.stages.models.stage import DecoderStage


class SquaredReLU(nn.Module):
    """Maps `[..., width]` to `[..., width]`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.up_proj(x).relu().square())
        return out


def build_layer(options: DecoderOptions, index: int) -> nn.Module:
    inner = options.hidden_size * int((options.model_extra or {})["ffn_factor"])
    return DecoderLayer(options, Attention(options), SquaredReLU(options.hidden_size, inner))


def build(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """Returns one stage. raypp calls this on every rank.

    Args:
        options: The `model:` section.
        layers: The layers of this stage.
        first: The stage has the embedding.
        last: The stage has the final norm, the projection and the loss.
    """
    return DecoderStage(options, layers, first, last, build_layer)

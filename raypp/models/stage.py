"""The stage contract: what a family must build, and what the pipeline may count on.

A stage is one `nn.Module` that holds some consecutive layers, the embedding if it is the first, and the
final norm and output projection if it is the last. Parameters carry their global names (Hugging Face's),
whatever the cut, so that a checkpoint of any mesh loads on any other.

Legend: B rows, T tokens of a row, C residual width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.models.documents import PackedDocuments
from raypp.models.layers import RMSNorm, rotary_table
from raypp.spec.families import FAMILIES, MODELS
from raypp.spec.models import DecoderOptions

LayerFactory = Callable[[DecoderOptions, int], nn.Module]


class Backbone(nn.Module):
    """Embedding, layers and norm; the parts a stage does not have are None."""

    def __init__(
        self, options: DecoderOptions, layers: range, first: bool, last: bool, make_layer: LayerFactory
    ) -> None:
        super().__init__()
        holds_matrix = first or (last and options.tie_embeddings)
        self.embed_tokens = nn.Embedding(options.vocab_size, options.hidden_size) if holds_matrix else None
        self.layers = nn.ModuleDict({str(index): make_layer(options, index) for index in layers})
        self.norm = RMSNorm(options.hidden_size, options.norm_eps) if last else None


class DecoderStage(nn.Module):
    """One stage of a decoder.

    Args:
        options: The `model:` section.
        layers: Global indices of the layers this stage holds.
        first: It holds the embedding, and takes token ids.
        last: It holds the final norm and the output projection, and gives logits.
        make_layer: Builds the layer of a global index; each family brings its own.
    """

    def __init__(
        self, options: DecoderOptions, layers: range, first: bool, last: bool, make_layer: LayerFactory
    ) -> None:
        super().__init__()
        self.options = options
        self.first = first
        self.model = Backbone(options, layers, first, last, make_layer)
        untied = last and not options.tie_embeddings
        self.lm_head = nn.Linear(options.hidden_size, options.vocab_size, bias=False) if untied else None
        copied = last and not first and options.tie_embeddings
        self.tied_copies = frozenset(("model.embed_tokens.weight",) if copied else ())
        """Parameters whose first copy another stage holds: they are counted, saved and told of there."""
        self._projection: Tensor | None = None
        self._separate = False

    def forward(
        self, x: Tensor, positions_BT: Tensor, documents: PackedDocuments, labelled_BT: Tensor | None = None
    ) -> Tensor:
        """Runs the stage on one microbatch.

        Args:
            x: Token ids int64 `[B, T]` on the first stage, else activations `[B, T, C]`.
            positions_BT: Position of every token in its document, int64 `[B, T]`.
            documents: The borders of the documents.
            labelled_BT: Tokens with a label, bool `[B, T]`, for losses that arise within a layer; None: no such losses.

        Returns:
            Activations `[B, T, C]`, or logits `[B, T, V]` on the last stage.
        """
        if self.first and self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        rotary = rotary_table(positions_BT.flatten(), self.options.dim_per_head, self.options.rope_theta, x.dtype)
        for layer in self.model.layers.values():
            x = layer(x, rotary, documents, labelled_BT)
        if self.model.norm is not None:
            x = self._logits(self.model.norm(x))
        return x

    def _logits(self, x_BTC: Tensor) -> Tensor:
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(x_BTC)
            return logits
        assert self.model.embed_tokens is not None
        weight: Tensor = self.model.embed_tokens.weight
        if self._separate and torch.is_grad_enabled():
            if self._projection is None:
                self._projection = weight.detach().requires_grad_()
            weight = self._projection
        return F.linear(x_BTC, weight)

    def separate_projection(self) -> None:
        """From now on, a stage that is the whole model accumulates the gradient of its tied projection apart from that
        of the embedding, as the two ends of a pipeline do; `join_projection` adds it. Not with sharded weights."""
        self._separate = True

    def join_projection(self) -> None:
        """Adds what the projection gathered since the last call to the embedding's gradient."""
        apart, self._projection = self._projection, None
        if apart is None or apart.grad is None or self.model.embed_tokens is None:
            return
        weight = self.model.embed_tokens.weight
        weight.grad = apart.grad if weight.grad is None else weight.grad.add_(apart.grad)

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The units that activation checkpointing, compilation and FSDP work on: name and module, in order."""
        yield from self.model.layers.items()


def build_decoder(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """A stage of a family in `raypp/families/`, from the layers that it builds."""
    return DecoderStage(options, layers, first, last, FAMILIES[options.kind].layer)


def build_stage(options: DecoderOptions, layers: range, *, first: bool, last: bool) -> nn.Module:
    """Builds one stage of any family on the meta device: it takes no memory; `init` or a checkpoint gives it values."""
    builder = MODELS.get(options.kind, key="model.kind").build()
    with torch.device("meta"):
        stage: nn.Module = builder(options, layers, first, last)
    return stage


def parameter_names(options: DecoderOptions) -> list[str]:
    """Global names of all parameters of the whole model, sorted: one order that no cut changes."""
    whole = build_stage(options, range(options.num_layers), first=True, last=True)
    return sorted(name for name, _ in whole.named_parameters())

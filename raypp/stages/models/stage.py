"""The stage contract: what a family must build, and what the pipeline relies on.

A stage is one `nn.Module` that holds consecutive layers, the embedding if it is the first stage,
and the final norm and output projection if it is the last. Parameters have global names (Hugging
Face's) that do not depend on the cut, so a checkpoint from any mesh loads on any other.

Legend: B rows, T tokens of a row, C residual width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.known_families import FAMILIES, MODELS, layer_rotary
from raypp.job.layer_rules import DeltaRule
from raypp.job.models import DecoderOptions, LatentOptions, MoeOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.layers import (
    Attention,
    DecoderLayer,
    FusedFeedForward,
    GatedFeedForward,
    PlainFeedForward,
    new_norm,
)
from raypp.stages.models.lora import add_adapters
from raypp.stages.models.loss import Targets, in_chunks, loss_sum_in_chunks, soft_capped, token_loss_sum
from raypp.stages.models.moe import MixtureOfExperts, MoeDecoderLayer
from raypp.stages.models.products import Lookup, Projection
from raypp.stages.models.rotary import Table, rotary_table
from raypp.stages.models.tensor_ranks import TensorRanks, weight_here

LayerFactory = Callable[[DecoderOptions, int], nn.Module]


class Backbone(nn.Module):
    """Embedding, layers and norm. Parts that the stage does not hold are None."""

    def __init__(
        self, options: DecoderOptions, layers: range, first: bool, last: bool, make_layer: LayerFactory
    ) -> None:
        super().__init__()
        holds_matrix = first or (last and options.tie_embeddings)
        self.embed_tokens = Lookup(options.vocab_size, options.hidden_size) if holds_matrix else None
        self.layers = nn.ModuleDict({str(index): make_layer(options, index) for index in layers})
        self.add_module(options.stage_ends().norm_name, new_norm(options, options.hidden_size) if last else None)


class DecoderStage(nn.Module):
    """One stage of a decoder. `first`: the stage holds the embedding and takes token ids. `last`:
    the stage holds the final norm and the output projection and returns logits or the loss.
    `make_layer`: the family's function that builds the layer of a global index."""

    def __init__(
        self, options: DecoderOptions, layers: range, first: bool, last: bool, make_layer: LayerFactory
    ) -> None:
        super().__init__()
        self.options = options
        self.first = first
        self.holds_both_ends = first and last
        self.ends = options.stage_ends()
        self.model = Backbone(options, layers, first, last, make_layer)
        untied = last and not options.tie_embeddings
        self.lm_head = Projection(options.hidden_size, options.vocab_size, bias=False) if untied else None
        copied = last and not first and options.tie_embeddings
        self.tied_copies = frozenset(("model.embed_tokens.weight",) if copied else ())
        """Tied parameters whose first copy is on another stage, which counts and saves them."""
        self._rotary = {str(index): layer_rotary(options, index) for index in layers}
        self._projection: Tensor | None = None
        self._separate = False
        self.tensor: TensorRanks | None = None
        """The ranks that compute its blocks together (`parallel.tensor`); None: it does alone."""

    computes_loss = True
    """Its forward takes `targets`. Without this, the pipeline computes the loss from logits."""

    def forward(
        self,
        x: Tensor,
        positions_BT: Tensor,
        documents: PackedDocuments,
        labelled_BT: Tensor | None = None,
        targets: Targets | None = None,
        last_B: Tensor | None = None,
    ) -> Tensor:
        """Runs the stage on one microbatch.

        Args:
            x: Token ids int64 `[B, T]` on the first stage, else activations `[B, T, C]`.
            positions_BT: Position of every token in its document, int64 `[B, T]`.
            labelled_BT: Tokens with a label, bool `[B, T]`, for losses within a layer. None: no
                such losses.
            targets: Labels, on the last stage only. None: return logits.
            last_B: The index in each row of the token whose logits are returned, int64 `[B]`, on
                the last stage only. None: those of all tokens.

        Returns:
            Activations `[B, T, C]`. On the last stage logits `[B, T, V]`, `[B, 1, V]` with
            `last_B`, or with `targets` the summed loss `[]`.
        """
        if self.tensor is not None and labelled_BT is not None:
            labelled_BT = self.tensor.own(labelled_BT)
        tokens = x if self.tensor is None or not self.first else self.tensor.own(x)
        if self.first and self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
            if self.ends.embedding_factor != 1:
                # Rounded to the dtype of the embeddings, as the models were trained.
                x = x * torch.tensor(self.ends.embedding_factor, dtype=x.dtype)
        distinct = dict.fromkeys(rotary for rotary in self._rotary.values() if rotary is not None)
        tables = {rotary: rotary_table(positions_BT.flatten(), rotary, x.dtype, documents) for rotary in distinct}
        of_layers = [None if rotary is None else tables[rotary] for rotary in self._rotary.values()]
        x = self.run_layers(x, tokens, of_layers, documents, labelled_BT)
        norm: nn.Module | None = getattr(self.model, self.ends.norm_name)
        if norm is not None:
            if self.tensor is not None:
                x = self.tensor.gathered(x)
            if last_B is not None:
                x = x.gather(1, last_B[:, None, None].expand(-1, 1, x.shape[-1]))
            x = norm(x)
            if self.ends.logit_divisor != 1:
                x = x / self.ends.logit_divisor
            return self._logits(x) if targets is None else self._loss(x, targets)
        return x

    def run_layers(
        self,
        x_BTC: Tensor,
        tokens_BT: Tensor,
        tables: list[Table | None],
        documents: PackedDocuments,
        labelled_BT: Tensor | None,
    ) -> Tensor:
        """Runs the layers of the stage, each with its table: `[B, T, C]` to `[B, T, C]`.
        `tokens_BT` are ids on the first stage."""
        for layer, table in zip(self.model.layers.values(), tables, strict=True):
            x_BTC = layer(x_BTC, table, documents, labelled_BT)
        return x_BTC

    def _logits(self, x_BTC: Tensor) -> Tensor:
        """Projects `[B, T, C]` to logits `[B, T, V]`."""
        logits = F.linear(x_BTC, self._projection_weight()) if self.lm_head is None else self.lm_head(x_BTC)
        if self.tensor is not None:
            logits = self.tensor.whole_logits(logits)
        return soft_capped(logits, self.ends.logit_cap)

    def _loss(self, x_BTC: Tensor, targets: Targets) -> Tensor:
        """Returns the summed loss `[]` of `[B, T, C]`."""
        weight = self._projection_weight()
        if self.tensor is not None or in_chunks(x_BTC, weight):
            return loss_sum_in_chunks(x_BTC, weight, targets, self.ends.logit_cap, self.tensor)
        return token_loss_sum(self._logits(x_BTC), targets.labels_BT)

    def _projection_weight(self) -> Tensor:
        """Returns the matrix `[V, C]` of the projection."""
        if self.lm_head is not None:
            return weight_here(self.lm_head)
        assert self.model.embed_tokens is not None
        weight: Tensor = weight_here(self.model.embed_tokens)
        if self._separate and torch.is_grad_enabled():
            if self._projection is None:
                self._projection = weight.detach().requires_grad_()
                self._projection.grad_dtype = weight.grad_dtype
            weight = self._projection
        return weight

    def separate_projection(self) -> None:
        """Makes a stage that is the whole model keep the gradient of its tied projection separate.
        The gradient then accumulates apart from that of the embedding, as it does at the two ends
        of a pipeline. `join_projection` adds the two. Does not work with sharded weights."""
        self._separate = True

    def join_projection(self) -> None:
        """Adds the gradient `[V, C]` of the projection since the last call to the embedding's."""
        apart, self._projection = self._projection, None
        if apart is None or apart.grad is None or self.model.embed_tokens is None:
            return
        weight = self.model.embed_tokens.weight
        weight.grad = apart.grad if weight.grad is None else weight.grad.add_(apart.grad)


def computes_loss(stage: nn.Module) -> bool:
    """Whether a last stage takes `targets` and returns the loss, as a user's own module may."""
    return bool(getattr(stage, "computes_loss", False))


def return_logits(stage: nn.Module) -> None:
    """Makes a last stage return logits, whether it could compute the loss or not."""
    stage.computes_loss = False  # type: ignore[assignment]


def tied_copies(stage: nn.Module) -> frozenset[str]:
    """Returns the names of a stage's tied parameters that another stage counts and saves."""
    return frozenset(getattr(stage, "tied_copies", ()))


def holds_both_ends(stage: nn.Module) -> bool:
    """Whether a stage is the whole model."""
    return bool(getattr(stage, "holds_both_ends", False))


def tied_within(stage: nn.Module) -> nn.Parameter | None:
    """Returns the matrix `[V, C]` that embeds and projects, of a stage that does both."""
    tied = holds_both_ends(stage) and isinstance(stage, DecoderStage) and stage.options.tie_embeddings
    return stage.get_parameter("model.embed_tokens.weight") if tied else None


def build_decoder(options: DecoderOptions, layers: range, first: bool, last: bool) -> nn.Module:
    """Builds a stage of a family in `raypp/job/families/` from that family's layers."""
    return DecoderStage(options, layers, first, last, build_layer)


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    """Builds the layer with a global index as its family declares it."""
    layer = FAMILIES[options.kind].layer(options, index)
    attention: nn.Module
    if isinstance(rule := options.state_rule(index), DeltaRule):
        from raypp.stages.models.delta_rule import GatedDeltaRule

        attention = GatedDeltaRule(options, layer, rule)
    elif rule is not None:
        from raypp.stages.models.short_convolution import GatedConvolution

        attention = GatedConvolution(options, rule)
    elif isinstance(options, LatentOptions):
        from raypp.stages.models.latent_attention import LatentAttention

        attention = LatentAttention(options, layer, options.attention_rule(index))
    else:
        attention = Attention(options, layer, options.attention_rule(index))
    if layer.routes:
        assert isinstance(options, MoeOptions)
        return MoeDecoderLayer(options, attention, MixtureOfExperts(options, layer), layer)
    width, inner = options.hidden_size, options.ffn_size
    mlp: nn.Module
    if layer.mlp == "fused":
        mlp = FusedFeedForward(width, inner)
    elif layer.mlp == "plain":
        mlp = PlainFeedForward(width, inner, bias=layer.mlp_bias)
    else:
        gelu = partial(F.gelu, approximate="tanh")
        mlp = GatedFeedForward(width, inner, gelu if layer.mlp == "gelu" else F.silu, layer)
    return DecoderLayer(options, attention, mlp, layer)


def build_stage(options: DecoderOptions, layers: range, *, first: bool, last: bool) -> nn.Module:
    """Builds one stage of any family on the meta device. It takes no memory.
    `initial_values.initialise` or a checkpoint sets its values."""
    builder = MODELS.get(options.kind, key="model.kind").build()
    with torch.device("meta"):
        stage: nn.Module = builder(options, layers, first, last)
        add_adapters(stage, options, layers)
    return stage


def parameter_names(options: DecoderOptions, *, trained: bool = False) -> list[str]:
    """Returns the sorted global names of the model's parameters, the same for every cut. `options`:
    the `model:` section. `trained`: without frozen parameters."""
    whole = build_stage(options, range(options.num_layers), first=True, last=True)
    return sorted(name for name, parameter in whole.named_parameters() if parameter.requires_grad or not trained)

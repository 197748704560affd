"""The model and batch of all throughput figures, unless stated otherwise."""

from raypp.job.models import DecoderOptions

ROWS, MICROBATCHES, SEQ_LEN = 2, 8, 256


def model_options() -> DecoderOptions:
    return DecoderOptions(
        kind="llama", num_layers=8, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=688, vocab_size=4096
    )

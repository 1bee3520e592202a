"""Which class computes which architecture."""

from jaxllm.models.decoder import Decoder

# Hugging Face architecture name -> class. What sets the members of a family apart is in DecoderConfig.
MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class of an architecture.

    Raises:
        ValueError: naming the architecture and the supported ones.
    """
    if architecture not in MODELS:
        raise ValueError(f"model architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    return MODELS[architecture]

"""Tokenizers: the demo model's, and one of single bytes and very few words."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxllm.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Puts a token before every prompt, and joins the letters of a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox, the lazy dog, the end of the story"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")

"""The layers are a language model's: the last vector times the output embedding is the next logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rose.batch import Int32
from tests.unit.rose.bert_cases import random_sequences, run
from tests.unit.rose.parity import our_model, resized, save_oracle

NEW_TOKENS = 8


def language_models() -> list[PreTrainedModel]:
    """A Qwen3 of odd sizes, and SmolLM2-135M's layout (Llama, nine heads on three, tied) in small."""
    qwen3 = {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": False}
    smollm2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "rope_theta": 100000.0}
    return [
        Qwen3ForCausalLM(resized(Qwen3Config, **qwen3)),
        LlamaForCausalLM(resized(LlamaConfig, tie_word_embeddings=True, **smollm2)),
    ]


@pytest.mark.parametrize("oracle", language_models(), ids=["qwen3", "smollm2"])
def test_next_token_logits_and_what_they_generate(tmp_path: Path, oracle: PreTrainedModel) -> None:
    """Prompts of different lengths, generated side by side in one ragged batch, greedily."""
    model = our_model(save_oracle(tmp_path, oracle, "last"))
    table = oracle.get_output_embeddings().weight.detach()
    prompts = random_sequences(model.config, [5, 1, 17, 5])
    texts: list[Int32] = list(prompts)
    for _ in range(NEW_TOKENS):
        logits = run(model, texts).vectors @ table.T
        with torch.no_grad():
            for row, text in enumerate(texts):
                expected = oracle(torch.from_numpy(text).long()[None]).logits[0, -1]
                torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-3)
        chosen = logits.argmax(1).numpy().astype(np.int32)
        texts = [np.append(text, token) for text, token in zip(texts, chosen, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        written = oracle.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones_like(ids),
        )
        assert written[0].tolist() == text.tolist()

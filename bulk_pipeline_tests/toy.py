"""A tiny random Llama with its own tokenizer, made on the spot: 2 layers, width 64, 512 tokens.

It is a complete model folder (config.json, generation_config.json, model.safetensors,
tokenizer.json, tokenizer_config.json), the same at every call, and talks nonsense.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 512
BOS, EOS, PAD, TURN_START, TURN_END = "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, PAD, TURN_START, TURN_END)
BOS_ID, EOS_ID, PAD_ID, TURN_START_ID, TURN_END_ID = range(5)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? "
    "Write a short story about a robot who learns to paint.\nsystem user assistant\n"
    "def main(): return [x for x in range(10)] # 0 1 2 3 4 5 6 7 8 9\n"
    "Schreibe ein Gedicht über den Herbst. Übersetze den Satz. ¿Cuál es la capital de España? "
    "Explain how photosynthesis works, step by step, and summarise the following paragraph: "
    "a language model reads text one token after another and predicts the next word. "
)


def toy_model(
    folder: Path,
    dtype: str = "float32",
    *,
    seed: int = 0,
    add_bos: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write the model into `folder` and return it.

    Parameters
    ----------
    dtype
        Of the weights: float32, float64, float16 or bfloat16.
    seed
        Of the weights; another seed is another model with the same tokenizer.
    add_bos
        Whether the tokenizer adds <s> by itself.
    chat_template
        None writes none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, add_bos, chat_template)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
        initializer_range=0.3,  # wide, so that logits differ clearly
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    _complete_config(folder / "config.json", dtype)
    return folder


def _complete_config(path: Path, dtype: str) -> None:
    """Add what exllamav2 reads and transformers 5 no longer writes."""
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    path.write_text(json.dumps(config, indent=1))


def _write_tokenizer(folder: Path, add_bos: bool, chat_template: str | None) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    } | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

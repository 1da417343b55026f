"""`python -m megappo.data.prepare.tiny_model --out DIR`: a small random Llama with a tokenizer of its own.

For the quickstart and for tests: nothing has to be downloaded. The tokenizer knows digits, signs and the words of
the given files; words are whole tokens, digits are single ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megappo.errors import UserError

PATTERN = r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]"
SPECIAL = ("<pad>", "<eos>", "<unk>")


def build_tokenizer(texts: Iterable[str]):
    """A `PreTrainedTokenizerFast` over the pieces of `texts` (and all digits); decoding joins without spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = {piece for text in texts for piece in re.findall(PATTERN, text)}
    pieces = [*SPECIAL, *sorted(found | set("0123456789"))]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def write_tiny_model(
    out: Path, texts: Iterable[str], *, hidden: int = 96, layers: int = 3, heads: int = 4, seed: int = 0
) -> int:
    """Write a Hugging Face folder; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer(texts)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=max(8, hidden * 8 // 3 // 8 * 8),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=hidden**-0.5,  # the usual 0.02 suits wide models: this narrow one starts to learn late
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


def _texts(files: Sequence[str]) -> list[str]:
    from megappo.data.prompts import read_rows

    texts: list[str] = []
    for row in read_rows(files):
        for value in (row.get("prompt"), row.get("response")):
            if isinstance(value, str):
                texts.append(value)
            elif value is not None:
                texts += [str(message["content"]) for message in value]
    return texts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", nargs="+", required=True, help="parquet or JSONL files whose words it knows")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        count = write_tiny_model(
            args.out,
            _texts(args.data),
            hidden=args.hidden,
            layers=args.layers,
            heads=args.heads,
            seed=args.seed,
        )
    except UserError as err:
        sys.exit(f"error: {err}")
    print(f"{args.out}: {count:,} parameters")


if __name__ == "__main__":
    main()

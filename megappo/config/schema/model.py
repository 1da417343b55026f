"""`model`: the language model that is trained (Hugging Face folder)."""

from pathlib import Path

from megappo.config.schema.base import Dtype, Section, key


class ModelConfig(Section):
    """The policy's starting point; critic and reference start from it too unless they name their own path."""

    path: str = key(..., "Hugging Face folder with config.json and *.safetensors.", path=True)
    tokenizer_path: str | None = key(None, "Folder with the tokenizer; null: model.path.", path=True)
    dtype: Dtype = key("fp32", "Number format of the weights in forward and backward (fp32 or bf16).")
    router_aux_loss_coef: float = key(
        0.0, "Weight of the experts' load-balancing loss while training; 0: off. Depends on the micro-batches.", ge=0
    )
    chat_template: str | None = key(None, "Jinja chat template, inline or as a file path; null: the tokenizer's own.")

    @property
    def chat_template_file(self) -> str | None:
        """The template's file, or None if there is no template or it stands inline (it has a brace)."""
        value = self.chat_template
        return value if value and "{" not in value and "\n" not in value else None

    def read_chat_template(self) -> str | None:
        """The template's text (read from its file where a path is given); None: the tokenizer's own."""
        file = self.chat_template_file
        return Path(file).read_text(encoding="utf-8") if file else self.chat_template

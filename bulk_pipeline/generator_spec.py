"""The settings of the model, and of how it is held in memory."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PAGE_TOKENS = 256  # exllamav2's page size; the cache is a whole number of pages


class GeneratorSettings(BaseModel):
    """The model, and how it is held in memory. The fields of `ExLlamaV2Resource`."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        description="Model folder, hub id (owner/name), or URL: a folder on s3://, gs:// or az://, "
        "or an archive (.tar, .tar.gz, .tgz, .zip) there or on https://; a machine downloads it "
        "once. Relative paths start at the project's folder."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model. Default: the newest."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto is cuda where a GPU is visible, else cpu."
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="Arithmetic on the CPU; a GPU computes in float16."
    )
    weights: Literal["auto", "quantized", "float16"] = Field(
        "auto",
        description="How a GPU holds a quantised model: as it is stored, or dequantised once to "
        "float16, which takes two bytes a parameter and saves doing it at every step. auto "
        "dequantises where that takes at most a third of the GPU's memory, on one GPU and with "
        "an fp16 cache.",
    )
    max_batch_size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Most requests in generation at once; 1 to 4096. Default (null): auto, 16 on "
        "a CPU, and on a GPU as many as 4% of its memory holds logits for, up to 1024; as many of "
        "them run as the cache holds.",
    )
    cache_tokens: int | None = Field(
        None,
        ge=PAGE_TOKENS,
        description="Size of the KV cache in tokens, rounded down to pages of "
        f"{PAGE_TOKENS}; all requests in generation share it. Default (null): auto, as much as "
        "the batch can use and memory allows.",
    )
    cache_type: Literal["fp16", "q8", "q6", "q4"] = Field(
        "fp16", description="Precision of the KV cache on a GPU; a CPU keeps it in `dtype`."
    )
    max_seq_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a prompt and its completion together. Default (null): what "
        "the model was made for.",
    )
    max_chunk_size: int = Field(
        8192,
        ge=PAGE_TOKENS,
        multiple_of=PAGE_TOKENS,
        description=f"Most prompt tokens in one forward pass, a multiple of {PAGE_TOKENS}.",
    )
    gpus: int | None = Field(
        None,
        ge=1,
        description="GPUs that a process takes, of those that it may see and no other process of "
        "this machine holds; the model is split over them. Default (null): as many as `gpu_split` "
        "names, all with `tensor_parallel`, else 1.",
    )
    gpu_split: list[float] | None = Field(
        None,
        description="GiB of weights for each GPU, in order. Default (null): as exllamav2 splits "
        "them over the GPUs taken.",
    )
    tensor_parallel: bool = Field(
        False,
        description="Split every layer over the GPUs taken, where it is otherwise placed whole "
        "on one.",
    )
    gpu_wait_seconds: float | None = Field(
        None,
        ge=0,
        description="How long to wait for GPUs that other processes of this machine hold, "
        "before the step fails. Default (null): for ever.",
    )
    rope_scale: float | None = Field(
        None, gt=0, description="Linear scale of positions on a GPU. Default (null): the model's."
    )
    rope_alpha: float | None = Field(
        None, gt=0, description="NTK scale of the rope base on a GPU. Default (null): none."
    )
    draft_model: str | None = Field(
        None,
        description="Folder, hub id or URL of a smaller model with the same vocabulary, for "
        "speculative decoding; pays with small batches only. Off: null.",
    )
    num_draft_tokens: int = Field(
        4, ge=1, le=16, description="Tokens drafted a step, where there is a draft model; 1 to 16."
    )
    speculative: Literal["off", "auto", "ngram"] = Field(
        "off",
        description="Whether to draft tokens and check several in one pass, which pays with small "
        "batches. ngram drafts, at any batch, what followed a row's last tokens where they stood "
        "before in its prompt or its answer. auto does so while at most `speculative_max_rows` "
        "rows run, and times steps with and without drafts, so that little is lost where they do "
        "not pay; a `draft_model` drafts in its place where `max_batch_size` is at most that, and "
        "is not loaded where it is more. off: only a `draft_model` drafts, at any batch.",
    )
    speculative_max_rows: int = Field(
        8,
        ge=1,
        le=4096,
        description="Most rows at once with which `speculative: auto` drafts; 1 to 4096.",
    )
    num_speculative_tokens: int = Field(
        4, ge=1, le=16, description="Most tokens of a row drafted by n-grams a step; 1 to 16."
    )
    prompt_lookup_max: int = Field(
        4, ge=1, le=16, description="Most of a row's last tokens that n-grams look for; 1 to 16."
    )
    prompt_lookup_min: int = Field(
        2,
        ge=1,
        le=16,
        description="Fewest of a row's last tokens that n-grams look for; at most "
        "`prompt_lookup_max`.",
    )

    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters of this model that sampling.adapter may name, such as "
        "{support: adapters/support}: a folder as PEFT writes it, a hub id or a URL. Off: empty.",
    )

    @property
    def gpu_count(self) -> int | None:
        """How many GPUs a process takes; None: all that it may see."""
        if self.gpus is not None or self.gpu_split is not None:
            return self.gpus or len(self.gpu_split or [0])
        return None if self.tensor_parallel else 1

    @field_validator("speculative", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False or value is None else value  # YAML reads off as false

    @model_validator(mode="after")
    def _a_share_for_each_gpu(self) -> Self:
        if self.gpus and self.gpu_split is not None and len(self.gpu_split) != self.gpus:
            raise ValueError(
                f"gpu_split must name {self.gpus} GPUs, as gpus has it, got {self.gpu_split}"
            )
        return self

    @model_validator(mode="after")
    def _drafts_in_one_way(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )
        if self.speculative == "ngram" and self.draft_model:
            raise ValueError(
                "speculative: ngram does not work with draft_model; set it to auto or off, or "
                "draft_model to null"
            )
        return self

    @model_validator(mode="after")
    def _adapters_alone(self) -> Self:
        if self.adapters and self.draft_model:
            raise ValueError("adapters do not work with draft_model; set draft_model to null")
        if self.adapters and self.tensor_parallel:
            raise ValueError(
                "adapters do not work with tensor_parallel; set that to false, or merge the "
                "adapter into the model"
            )
        return self

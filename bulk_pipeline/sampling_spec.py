"""The settings of a completion: how it is sampled, when it ends, and what comes with it."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bulk_pipeline.engine.request import MAX_LOGPROBS

_TokenId = Annotated[int, Field(ge=0)]

# What other programs have: exllamav2's own settings, and what vLLM, OpenAI or transformers name
# otherwise than this one does.
NOT_DONE = re.compile(
    "mirostat.*|dry_.*|xtc_.*|typical(_p)?|tfs(_z)?|top_a|skew|cfg_scale|guidance_scale|"
    "smoothing_(factor|curve)|(min|max)_temp|temp_exponent|temperature_last|"
    "token_repetition_(range|decay)|filters|"
    "num_beams|use_beam_search|penalty_alpha|length_penalty"
)
OTHER_NAMES = {
    "token_repetition_penalty": "repetition_penalty",
    "token_frequency_penalty": "frequency_penalty",
    "token_presence_penalty": "presence_penalty",
    "token_bias": "logit_bias",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n",
    "top_logprobs": "logprobs",
    "response_format": "structured_output",
    "disallow_tokens": "banned_token_ids",
    "thinking_budget": "thinking_token_budget",
    "guided_decoding": "structured_output",
    "guided_json": "structured_output.json_schema",
    "guided_regex": "structured_output.regex",
    "guided_choice": "structured_output.choice",
    "guided_grammar": "structured_output.grammar",
    "lora": "adapter",
    "lora_name": "adapter",
    "lora_request": "adapter",
    "loras": "adapter",
}

# What a row may have in a column of its own.
RowSetting = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "banned_token_ids",
    "max_new_tokens",
    "min_new_tokens",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "logprobs",
    "structured_output",
    "loop_guard",
    "allowed_token_ids",
    "bad_words",
    "banned_strings",
    "thinking_token_budget",
    "adapter",
]


class Settings(BaseModel):
    """Settings of which no unknown one is taken."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StructuredOutputSpec(Settings):
    """What the answers must be; exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(
        None,
        description="JSON schema, or the path of a file that holds one; the answer is JSON that "
        "it describes. Relative paths start at the project's folder. Off: null.",
    )
    regex: str | None = Field(
        None,
        description="Regular expression for the whole answer, such as '[0-9]{1,3}'. Off: null.",
    )
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, description="The answer is one of these texts. Off: null."
    )
    grammar: str | None = Field(
        None, description="Grammar of the answer in Lark's notation, or in GBNF. Off: null."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "set exactly one of json_schema, regex, choice and grammar, "
                f"got {' and '.join(given) or 'none'}"
            )
        return self

    @model_serializer(mode="wrap")
    def _given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}

    def read_file(self) -> Self:
        """The same with the schema in place of the path of its file.

        Raises
        ------
        ValueError
            If there is no such file, or no JSON object in it.
        """
        if not isinstance(self.json_schema, str):
            return self
        field = "sampling.structured_output.json_schema"
        try:
            schema = json.loads(Path(self.json_schema).read_text("utf-8"))
        except OSError as error:
            raise ValueError(
                f"{field}: {self.json_schema} cannot be read ({error.strerror}); correct the path"
            ) from None
        except ValueError as error:
            raise ValueError(f"{field}: {self.json_schema} is not JSON ({error})") from None
        if not isinstance(schema, dict):
            raise ValueError(f"{field}: {self.json_schema} must hold a JSON object; correct it")
        return self.model_copy(update={"json_schema": schema})


class LoopGuardSpec(Settings):
    """When an answer counts as caught in a loop."""

    ngram: int = Field(
        ge=1, le=1000, description="Length in tokens of what is repeated; 1 to 1000."
    )
    repeats: int = Field(
        ge=2, le=1000, description="How many times it stands in a row at the end; 2 to 1000."
    )


class SamplingSpec(Settings):
    """How completions are sampled and when they end."""

    temperature: float = Field(
        1.0, ge=0, le=100, description="Divides the logits; 0 (greedy) or more. Neutral: 1."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Most probable tokens up to this sum, in (0, 1]. Off: 1."
    )
    top_k: int = Field(0, ge=0, description="This many most probable tokens; 0 or more. Off: 0.")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Tokens at least this share as probable as the best, in [0, 1]. Off: 0.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=10,
        description="Divides the positive logits of tokens that are in the prompt or the "
        "completion so far, multiplies the negative ones; above 0, to 10. Off: 1.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Taken off a token's logit for each time that it is in the completion so "
        "far, in [-2, 2]. Off: 0.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Taken off the logits of all tokens that are in the completion so far, in "
        "[-2, 2]. Off: 0.",
    )
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict,
        description="Token id: number added to its logit before the penalties, in [-100, 100]; "
        "-100 all but bans the token. Off: empty.",
    )
    banned_token_ids: list[_TokenId] = Field(
        default_factory=list, description="Token ids that never come. Off: empty."
    )
    max_new_tokens: int = Field(
        256,
        ge=0,
        description="Most tokens of a completion; 1 or more, and 0 with prompt_logprobs, where "
        "nothing is to be generated.",
    )
    min_new_tokens: int = Field(
        0, ge=0, description="Tokens before an end token may come; 0 or more. Off: 0."
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="The run's seed, from 0; each sample's own seed is made of it, the row's id "
        "and the sample's index.",
    )
    n: int = Field(1, ge=1, le=1000, description="Samples (completions) of each row; 1 to 1000.")
    stop: list[str] = Field(
        default_factory=list,
        description="Strings that end a completion; they are not part of it. Off: empty.",
    )
    stop_token_ids: list[int] = Field(
        default_factory=list,
        description="Token ids that end a completion, besides the model's own. Off: empty.",
    )
    ignore_eos: bool = Field(
        False, description="Go on past the model's own end tokens, to max_new_tokens."
    )

    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Keep the log-probability of each generated token (columns logprobs and "
        "cumulative_logprob), and those of this many best tokens in its place (top_logprobs), as "
        f"the model gives them before sampling; 0 to {MAX_LOGPROBS}, such as 5. Off: null.",
    )
    prompt_logprobs: bool = Field(
        False,
        description="Score the prompts: the log-probability of each of their tokens but the first, "
        "their sum and the prompt's perplexity (columns prompt_logprobs, "
        "cumulative_prompt_logprob and perplexity). With max_new_tokens: 0 nothing is generated. "
        "To choose among given answers, give each a row and compare the sums.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Make this many samples of a row, of which output keeps the `n` with the best "
        "mean log-probability; n to 1000, such as 8. Off: null.",
    )
    structured_output: StructuredOutputSpec | None = Field(
        None,
        description="What the answers must be: a JSON schema, a regular expression, one of some "
        "choices, or a grammar, such as {choice: [positive, negative]}. Off: null.",
    )
    loop_guard: LoopGuardSpec | None = Field(
        None,
        description="End answers that repeat themselves, with the status loop, such as "
        "{ngram: 8, repeats: 4}. Off: null.",
    )
    allowed_token_ids: list[_TokenId] = Field(
        default_factory=list,
        description="The only token ids that may come; end tokens come only if they are among "
        "them. Off: empty.",
    )
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Words that never come, at the beginning of a text or after a space, such as "
        "[sorry]. They are looked for as the tokens that the tokenizer makes of them: the last is "
        "banned after those before it. Off: empty.",
    )
    banned_strings: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Strings that no completion holds, in upper or lower case, however its tokens "
        "make them up, such as ['as an ai']: a completion that holds one goes back to the token "
        "where it began, and takes another. Not with structured_output. Off: empty.",
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=0,
        description="Most tokens that a reasoning model thinks for, before the end mark of "
        "output.reasoning, which must be set, is put in and the answer goes on; within "
        "max_new_tokens; 0 or more, such as 512. Not with structured_output. Off: null.",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="The LoRA adapter that the model answers with: a name of generator.adapters. "
        "Off: null, the model as it is.",
    )
    from_columns: dict[RowSetting, str] = Field(
        default_factory=dict,
        description="Settings that each row has in a column, such as {temperature: temp, stop: "
        "ends}; null or empty text there is this value of the dataset. Lists and mappings may be "
        "JSON text. A row with a bad value gets the status invalid. Off: empty.",
    )

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must not exceed max_new_tokens ({self.max_new_tokens}), "
                f"got {self.min_new_tokens}"
            )
        if not self.max_new_tokens and not self.prompt_logprobs:
            raise ValueError("max_new_tokens must be 1 or more, got 0; 0 needs prompt_logprobs")
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string; remove it")
        return self

    @model_validator(mode="after")
    def _best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.best_of is not None and "n" in self.from_columns:
            raise ValueError("set best_of or from_columns.n, not both")
        return self

    @model_validator(mode="after")
    def _not_with_structure(self) -> Self:
        for name in ("banned_strings", "thinking_token_budget"):
            if self.structured_output is not None and getattr(self, name) not in ([], None):
                raise ValueError(f"set structured_output or {name}, not both")
        return self

    @property
    def may_budget_thoughts(self) -> bool:
        """Whether some rows have a budget for thoughts."""
        name = "thinking_token_budget"
        return self.thinking_token_budget is not None or name in self.from_columns

    @property
    def num_samples(self) -> int:
        """How many completions are made of a row."""
        return self.best_of or self.n

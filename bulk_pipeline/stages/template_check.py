"""Whether a chat template can render a dataset's kind of prompt, tried before any row.

A template that cannot is a ValueError of one line, which names the setting to change.
"""

from jinja2 import TemplateSyntaxError

from bulk_pipeline.engine.request import READY
from bulk_pipeline.spec import BulkInferenceSpec, ReasoningSpec
from bulk_pipeline.stages.prompt_rows import PromptRow
from bulk_pipeline.stages.reasoning import check_not_open
from bulk_pipeline.stages.rendering import Renderer
from bulk_pipeline.stages.row_sampling import RowSampling
from bulk_pipeline.stages.turns import Chat, Turn

SLOT = "\ue000"  # stands for an answer where a template is tried


def check_template(spec: BulkInferenceSpec, renderer: Renderer, sampling: RowSampling) -> None:
    """Raise a ValueError if the chat template cannot render the dataset's kind of prompt."""
    prompt, reasoning = spec.prompt, spec.output.reasoning
    system = prompt.system
    turns = [{"role": "system", "content": system}] if system is not None else []
    chat = Chat([*turns, {"role": "user", "content": "Hello"}])
    try:
        rendered = renderer.texts([chat])[0]
    except TemplateSyntaxError as error:
        raise ValueError(
            f"prompt.chat_template, line {error.lineno}: {error.message}; "
            "correct the template or choose another"
        ) from None
    except Exception as error:  # whatever a template raises
        if system is None and prompt.messages_column:
            return  # it may need more turns than one
        if system is None:
            raise ValueError(
                f"prompt.chat_template fails on a plain message ({error}); choose another"
            ) from None
        rendered, reason = "", f" ({error})"
    else:
        reason = ""
    if system and system.strip() not in rendered:
        raise ValueError(
            f"prompt.system: the chat template {prompt.chat_template} takes no system "
            f"prompt{reason}; remove prompt.system, or set prompt.chat_template to a family "
            "or file that takes one"
        )
    if spec.sampling.structured_output is not None and reasoning is not None:
        check_not_open(rendered, prompt.assistant_prefix, reasoning)
    if prompt.turns_column:
        _check_conversations(spec, renderer, sampling, turns)


def _check_conversations(
    spec: BulkInferenceSpec, renderer: Renderer, sampling: RowSampling, system: list[Turn]
) -> None:
    """Raise a ValueError if the chat template does not take answers as they are."""
    user = {"role": "user", "content": "Hello"}
    row = PromptRow("", sampling, Chat([*system, user, user], "", (len(system),), SLOT))
    renderer.render_one(row)
    if row.status != READY:
        raise ValueError(
            f"prompt.turns_column: {row.error}; set prompt.chat_template to a family or file "
            "for several turns"
        )
    marks = spec.output.reasoning or ReasoningSpec()
    answer = f"{marks.start}\nWell.\n{marks.end}\n\nHello"
    turns = [*system, user, {"role": "assistant", "content": answer}, user]
    if answer not in renderer.texts([Chat(turns)])[0]:
        raise ValueError(
            f"prompt.turns_column: the chat template {spec.prompt.chat_template} drops what "
            f"stands between {marks.start} and {marks.end} in earlier answers, and the next "
            "turn goes on from answers as they were generated; set prompt.chat_template to a "
            "copy that keeps it"
        )

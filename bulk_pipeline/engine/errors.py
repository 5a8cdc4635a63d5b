"""What may go wrong in generation, and how it is said in one line."""

MAX_REASON = 300


class GenerationError(RuntimeError):
    """The model failed on the requests in generation, one of which may be the reason.

    Memory that is full is none, and neither is an error in what the engine is given or calls back.
    """


def is_failure(error: BaseException) -> bool:
    """Whether something failed, in place of an interrupt or full memory.

    Libraries in Rust (tokenizers, llguidance) end in panics, which are no `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    return (isinstance(error, Exception) or is_panic) and not isinstance(error, MemoryError)


def reason_of(error: BaseException) -> str:
    """Say in one line what an exception says, not too long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0].strip()}' if lines else ''}"[:MAX_REASON]

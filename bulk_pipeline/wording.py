"""Words of messages that several modules share."""


def counted(count: int, thing: str) -> str:
    """``1 partition``, ``2 partitions``: a count of things whose plural ends in s."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"

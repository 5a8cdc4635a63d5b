"""Which page of the cache holds which tokens, who uses it, and what a new prompt can reuse.

A page's content is known by the tokens before it and its own. A full page of equal content is
shared as it is; of a page that begins as the prompt goes on, a copy saves computing the beginning.
Pages keep their content until they are needed for something else, the longest unused first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bulk_pipeline.spec import PAGE_TOKENS

ROOT = b""  # the key of what comes before a first page
MIN_COPY_TOKENS = 32  # copying a page for fewer tokens costs more than computing them
MAX_CANDIDATES = 16  # pages looked at for the longest common beginning
SCRATCH_PAGE = 0  # takes what is written past a row's end; never given to a row


@dataclass(slots=True)
class Prefix:
    """What of a prompt stands in the cache.

    Attributes
    ----------
    pages
        Full pages, in order, to be shared.
    key
        The key of the last of them.
    source
        A page that begins as the prompt goes on after them, to be copied; None where none does.
    copied
        How many tokens of `source` count.
    """

    pages: list[int] = field(default_factory=list)
    key: bytes = ROOT
    source: int | None = None
    copied: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.pages) * PAGE_TOKENS + self.copied


@dataclass(slots=True)
class _Page:
    users: int = 0
    key: bytes | None = None  # of the full page, where it is shared under it
    group: tuple[bytes, bytes] | None = None  # where its beginning is found
    tokens: np.ndarray | None = None  # int64, its known beginning
    written: int = -1  # the round in which `tokens` was last extended


class PageTable:
    """The pages of one cache.

    Parameters
    ----------
    num_pages
        Pages of the cache. The first is the scratch page.

    Attributes
    ----------
    round
        Counts the forward passes over prompts. A page that the present one writes can be shared
        whole within it, but not copied.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Forget all content and all users."""
        self.round = 0
        self._pages = [_Page() for _ in range(self.num_pages)]
        self._blank = list(range(self.num_pages - 1, SCRATCH_PAGE, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content, longest unused first
        self._full: dict[bytes, int] = {}
        self._groups: dict[tuple[bytes, bytes], OrderedDict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return len(self._blank) + len(self._unused)

    def match(self, ids: np.ndarray, *, pending: bool = False) -> Prefix:
        """Find the longest beginning of `ids` (int64) that stands in pages.

        With `pending`, pages count for copying that the present round writes, too.
        """
        prefix = Prefix()
        for start in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            key = _page_key(prefix.key, ids[start : start + PAGE_TOKENS])
            page = self._full.get(key)
            if page is None:
                break
            prefix.pages.append(page)
            prefix.key = key
        rest = ids[len(prefix.pages) * PAGE_TOKENS :][:PAGE_TOKENS]
        if len(rest) >= MIN_COPY_TOKENS:
            candidates = self._groups.get(_group(prefix.key, rest), ())
            for count, page in enumerate(reversed(candidates)):
                if count == MAX_CANDIDATES:
                    break
                found = self._pages[page]
                if found.written == self.round and not pending:
                    continue
                assert found.tokens is not None
                common = _common_length(found.tokens, rest)
                if common > prefix.copied:
                    prefix.source, prefix.copied = page, common
        return prefix

    def take(self, prefix: Prefix, num_new: int) -> list[int] | None:
        """Use the shared pages of `prefix` and `num_new` others; None where too few are free.

        `prefix.source` may be among the others: read all sources before anything is written.
        """
        unused_shared = sum(page in self._unused for page in prefix.pages)
        if self.num_free - unused_shared < num_new:
            return None
        for page in prefix.pages:
            self._unused.pop(page, None)
            self._pages[page].users += 1
        return [*prefix.pages, *(self._take_one() for _ in range(num_new))]

    def take_one(self) -> int | None:
        """Use one more page; None where none is free."""
        return self._take_one() if self.num_free else None

    def describe(self, pages: Sequence[int], ids: np.ndarray, start: int = 0) -> None:
        """Say that `pages` hold the tokens `ids` from their beginning on.

        `start` tokens of them were described before.
        """
        parent, first = ROOT, start // PAGE_TOKENS
        if first:
            parent = _chain_key(ids[: first * PAGE_TOKENS])
        for index in range(first, -(-len(ids) // PAGE_TOKENS)):
            tokens = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            page = self._pages[pages[index]]
            is_full = len(tokens) == PAGE_TOKENS
            if page.key is None and len(tokens) >= MIN_COPY_TOKENS:
                self._describe_beginning(pages[index], parent, tokens)
            if is_full:
                parent = _page_key(parent, tokens)
                if page.key is None and parent not in self._full:
                    self._full[parent] = pages[index]
                    page.key = parent

    def release(self, pages: Iterable[int]) -> None:
        """Stop using `pages`, given in their order in the row."""
        for number in reversed(list(pages)):  # what comes first is of use the longest
            page = self._pages[number]
            page.users -= 1
            if page.users == 0:
                if page.tokens is None and page.key is None:
                    self._blank.append(number)
                else:
                    self._unused[number] = None

    def _describe_beginning(self, number: int, parent: bytes, tokens: np.ndarray) -> None:
        page, group = self._pages[number], _group(parent, tokens)
        assert page.group in (None, group), "a page that is described again begins as before"
        page.group, page.tokens, page.written = group, tokens.copy(), self.round
        members = self._groups.setdefault(group, OrderedDict())
        members[number] = None
        members.move_to_end(number)

    def _take_one(self) -> int:
        if self._blank:
            number = self._blank.pop()
        else:
            number, _ = self._unused.popitem(last=False)
            self._forget(number)
        self._pages[number].users = 1
        return number

    def _forget(self, number: int) -> None:
        page = self._pages[number]
        if page.key is not None:
            del self._full[page.key]
        if page.group is not None:
            members = self._groups[page.group]
            del members[number]
            if not members:
                del self._groups[page.group]
        self._pages[number] = _Page(users=page.users)


def _page_key(parent: bytes, tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def _chain_key(ids: np.ndarray) -> bytes:
    key = ROOT
    for start in range(0, len(ids), PAGE_TOKENS):
        key = _page_key(key, ids[start : start + PAGE_TOKENS])
    return key


def _group(parent: bytes, tokens: np.ndarray) -> tuple[bytes, bytes]:
    return parent, tokens[:MIN_COPY_TOKENS].tobytes()


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.nonzero(a[:length] != b[:length])[0]
    return int(differs[0]) if len(differs) else length

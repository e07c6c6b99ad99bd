"""Text out of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

HELD_TOKENS = 8  # more that are no whole character are none: UTF-8's longest has 4 bytes


def stream_text(
    tokens: Iterator[int], before: Sequence[int], stops: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """Yield the text of `tokens` as soon as it cannot change any more: whole characters, and nothing of a stop.

    before: the tokens in front. A window of tokens is decoded with and without the new ones; what is added is their text. It begins
    with tokens that have a text, for decoders leave out a space that nothing is in front of.
    """
    longest = max((len(stop) for stop in stops), default=1)
    ids, shown, window = list(before), len(before), 0

    def text_up_to(end: int, last: bool) -> str:
        nonlocal shown, window
        old, new = decode(ids[window:shown]), decode(ids[window:end])
        if end == shown or (new.endswith("\ufffd") and not last and end - shown < HELD_TOKENS):
            return ""
        window, shown = (shown if decode(ids[shown:end]) else window), end
        return new[len(old) :]

    for token in tokens:
        ids.append(token)
        if any(ids[-len(stop) :] == list(stop) for stop in stops):
            continue  # it was the last one
        # The last tokens may be the beginning of a stop of several tokens.
        yield text_up_to(max(shown, len(ids) - (longest - 1)), last=False)
    ended = next((len(stop) for stop in stops if ids[-len(stop) :] == list(stop) and len(ids) > len(before)), 0)
    yield text_up_to(max(shown, len(ids) - ended), last=True)

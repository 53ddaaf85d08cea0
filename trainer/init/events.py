"""Detect preference in a log: weights of event types, words of rejection, ratings."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.tables.values import literal, quoted
from longtail.trainer.errors import DataError
from longtail.trainer.init.columns import spelled, split_words


def _forms(verbs: str) -> set[str]:
    """Return verbs and their forms with -s, -es, -ed and -ing."""
    roots = [(verb, root) for verb in verbs.split() for root in (verb, verb.removesuffix("e"), verb + verb[-1])]
    return {form for verb, root in roots for form in (verb, f"{verb}s", f"{root}es", f"{root}ed", f"{root}ing")}


# Gentle: one purchase in twenty that weighs 10 leaves two fifths of the pairs' (Σw)²/Σw².
_EVENT_WEIGHTS = {
    form: weight
    for weight, verbs in ((1, "view click"), (2, "like wishlist cart basket"), (3, "checkout purchase order buy"))
    for form in _forms(verbs)
} | {"bought": 3, "transaction": 3, "transactions": 3}
# An event type is a rejection if one of its words is, despite its other words (`view_skipped`): better an event too few
# than a rejection learnt as a wish. Whole words count, so that `banner`, `discount`, `hat` and `undergo` say nothing.
_REJECTING = _forms(
    "remove delete cancel refund reject decline dismiss complain dispute discard abandon skip mute hide ignore exclude "
    "hate revoke void deselect deactivate blacklist trash erase snooze ban spam regret withdraw downvote downrank"
) | {
    "removal", "deletion", "cancellation", "cancelation", "rejection", "complaint", "complaints", "chargeback",
    "chargebacks", "abandonment", "hid", "hidden", "withdrawn", "withdrawal", "dismissal", "exclusion", "reversal",
    "reversed", "abuse", "negative", "denied", "nope",
}  # fmt: skip
# Words that turn a word of `_WISHED` behind them, or stand last: `not_interested`, `unlike`, `dislike`; not `unlock` or
# `display`, as only words of `_EVENT_WORDS` are taken apart. `unblock` turns a rejection, and is none.
_TURNING = {"un", "dis", "not", "no", "never", "undo", "dont"}
_WISHED = (
    {*_EVENT_WEIGHTS}
    | _forms("follow subscribe favorite favourite fav save wish love heart star pin bookmark watch install vote upvote "
             "add match friend join enroll enrol register reserve book interest recommend approve agree select want")
    | {"happy", "helpful", "satisfied", "relevant", "useful", "finish", "finished", "show", "for", "my", "now", "again",
       "thanks"}
)  # fmt: skip
# Nouns, too: with a word of looking (`report_view`, `return_visit`) these say nothing.
_NOUNS = _forms("report return block flag") - {"reporting", "returning", "blocking"}
_LOOKING = _forms("view visit click open read download look scroll") | {"impression", "session"}
_ALONE = {"pass", "passed", "drop", "dropped", "bad", "left", "down", "x"}
_PHRASES = re.compile(
    r"\b(thumbs?|voted?) down\b|\bdown voted?\b|\bswiped? left\b|\bopt(ed)? out\b|\b(charged?|sen[dt]) back\b|\bless\b"
    r"|\b(clear(ed)?|empty|emptied) (cart|basket|wishlist)\b|\b(cart|basket|wishlist) (clear(ed)?|emptied)\b"
)
_HARMLESS = re.compile(
    r"\bskip(ped)? (intro|ads?|recap|credits|tutorial|forward|to)\b"
    r"|\breturn(ed|s)? (to )?(user|visitor|customer|shopper|buyer|home|page|site|app)s?\b"
)
_EVENT_WORDS = (_REJECTING | _TURNING | _NOUNS | _WISHED) - {"no"} | {
    "item", "product", "from", "to", "list", "thumb", "thumbs", "up", "down", "charge", "back", "opt", "out", "swipe",
    "left", "clear", "cleared", "empty", "emptied", "dropdown",
}  # fmt: skip
_RATINGS = {"rating", "ratings", "stars", "star", "score"}
_GOOD = 0.8
"""Share of the best rating from which a rating is good: four of five stars."""


def rejects(name: str) -> bool:
    """Return whether the words of an event type express rejection.

    Example:
        >>> [rejects(name) for name in ("RemoveFromCart", "unlike", "thumbs-down", "order_returned", "discount_view")]
        [True, True, True, True, False]
    """
    words = _words(name)
    text = _HARMLESS.sub("", " ".join(words))
    if text in _ALONE or _PHRASES.search(text):
        return True
    says = _REJECTING if _LOOKING & {*words} else _REJECTING | _NOUNS
    words = text.split()
    for previous, word in zip(["", *words], [*words, ""], strict=True):
        turned = previous in _TURNING and (not word or word in _WISHED or word in says)
        if turned != (word in says):
            return True
    return False


def _words(name: str) -> list[str]:
    return [part for word in spelled(re.sub("n['’]t(?![a-z])", " not", name)) for part in _parted(word) or [word]]


def _parted(word: str) -> list[str]:
    """Split a word such as `removefromcart` if it consists of known words."""
    if word in _EVENT_WORDS:
        return [word]
    for i in range(len(word) - 1, 1, -1):
        if word[:i] in _EVENT_WORDS and (tail := _parted(word[i:])):
            return [word[:i], *tail]
    return []


def draft_events(column: str, types: pa.ChunkedArray) -> tuple[list[str], dict[str, int]]:
    """Return comments about event types, and a weight per type, 0 for rejections; refuse only rejections."""
    counts = sorted(pc.value_counts(types).to_pylist(), key=lambda row: -row["counts"])
    shares = ", ".join(f"{row['values'] or 'none'} {row['counts'] / len(types):.0%}" for row in counts[:10])
    lines = [f"# Column {column}: {shares}."]
    names = [row["values"] for row in counts if row["values"]]
    weights = {
        name: 0 if rejects(name) else max((_EVENT_WEIGHTS.get(part, 1) for part in _words(name)), default=1)
        for name in names
    }
    rejected = [name for name in names if not weights[name]]
    if names and len(rejected) == len(names):
        raise DataError(
            f"column {column!r}: expected an event type of something wanted, found only words of rejection: "
            f"{', '.join(rejected)}; --set data.event=COLUMN names another"
        )
    if rejected:
        lines.append(f"# Words of rejection, no wish: 0 leaves the rows of {', '.join(rejected)} out.")
    return lines, weights


def draft_ratings(log: pa.Table, source: str) -> list[str]:
    """Draft comments about ratings, with an SQL query of the good ones."""
    lines = []
    for name in log.column_names:
        kind = log.schema.field(name).type
        numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        values_N = log[name].cast(pa.float64()).to_numpy() if numbers and split_words(name) & _RATINGS else None
        ratings = np.empty(0) if values_N is None else np.unique(values_N[np.isfinite(values_N)])
        if len(ratings) > 1 and ratings[-1] > 0:
            least = ratings[ratings >= _GOOD * ratings[-1]][0]
            good = f"SELECT * FROM {literal(source)} WHERE {quoted(name)} >= {least:g}"
            lines += [
                f"# Column {name}, {ratings[0]:g} to {ratings[-1]:g}: low ones count as positives; the good alone:",
                f"# train = {json.dumps(good, ensure_ascii=False)}",
            ]
    return lines

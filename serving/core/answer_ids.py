"""Answer ids: signed tokens that hold what feedback on an answer must know, so that no answer is stored.

A token is URL-safe text: base64 of a fixed head, the release's name, what the answer was made with, its first 100
labels as 16 bits each, the propensities of those drawn by chance, and the first 10 bytes of an HMAC-SHA256. Twenty
labels take 100 characters, and each 3 bytes of the release's name 4 more.

The 16 bits of a label depend on the token's own random odd number. So a label that was not answered passes for one of k
labels with a probability of k / 65,536, independently for every answer.
"""

from __future__ import annotations

import hmac
import math
import random
import struct
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longtail.bundle.arrays import Float32
from longtail.serving.monitoring import ArmAnswer

MAX_LABELS = 100
"""Labels of an answer that its id holds: those after the hundredth count as not answered."""
_HEAD = struct.Struct("<BBIIffB")
"""Format, key, time in seconds since 1970, random number, λ, μ, flags."""
_FORMAT = 1
_RESTRICTED, _IN_ARM = 1, 2
_SIGNATURE_BYTES = 10
_UNIT = struct.Struct("<Q")
_DRAWN = struct.Struct("<BH")
_STEPS = 1024
"""Of a propensity's code in one power of 2: it is off by 0.04 % at most."""
Refusal = Literal["malformed", "forged", "expired"]


class AnswerIdError(Exception):
    """An answer id that is none of this service's, or too old."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class AnswerRecord:
    """What an answer id says of an answer.

    Attributes:
        name: of the answer, no other has it.
        at: when, in whole seconds since 1970.
        arm: of an experiment, where arms are compared by the answer.
        restricted: whether the client said which labels may be answered.
        codes: of the first 100 labels in order, 16 bits each.
        propensities: P(shown) by place, of labels that were drawn.
        nonce: the number that labels are coded with.
    """

    name: str
    release: str
    at: int
    bias_removal: float
    popularity: float
    priors: tuple[float, ...]
    arm: ArmAnswer | None
    restricted: bool
    codes: tuple[int, ...]
    propensities: Mapping[int, float]
    nonce: int

    def positions(self, labels: Sequence[str]) -> list[int | None]:
        """Find the places of labels in the answer, from 0, by their ids; None: not among the first 100."""
        codes = _codes(labels, self.nonce)
        return [self.codes.index(code) if code in self.codes else None for code in codes]


def sign_answer(
    key: tuple[int, bytes],
    at: float,
    release: bytes,
    dials: tuple[float, float],
    labels: Sequence[str],
    *,
    priors: Sequence[float] = (),
    arm: ArmAnswer | None = None,
    restricted: bool = False,
    propensities_K: Float32 | None = None,
) -> tuple[str, str]:
    """Make the id of an answer, and its name: the signature, which no other answer has.

    Args:
        key: number and secret to sign with.
        at: when it was given, in seconds since 1970.
        release: name of the release that answered, UTF-8, at most 255 bytes.
        labels: ids of the answered labels, in order, K.
        arm: in which it was answered; kept where arms are compared by it.
        propensities_K: P(shown) of each label, float32 [K]; None: all are 1.
    """
    number, secret = key
    nonce = random.getrandbits(32) | 1
    counted = arm if arm is not None and arm.counted else None
    flags = (_RESTRICTED if restricted else 0) | (_IN_ARM if counted else 0)
    codes = _codes(labels[:MAX_LABELS], nonce)
    parts = [
        _HEAD.pack(_FORMAT, number & 255, int(at), nonce, *dials, flags),
        bytes((len(release),)), release,
        struct.pack(f"<B{len(priors)}f", len(priors), *priors),
        struct.pack(f"<B{len(codes)}H", len(codes), *codes),
    ]  # fmt: skip
    if counted is not None:
        names = [name.encode() for name in (counted.run, counted.arm)]
        parts += [_UNIT.pack(counted.unit), *(bytes((len(name),)) + name for name in names)]
    if propensities_K is not None:
        drawn = np.flatnonzero(propensities_K[:MAX_LABELS] < 1).tolist()
        parts += [_DRAWN.pack(place, _code_of(float(propensities_K[place]))) for place in drawn]
    content = b"".join(parts)
    signature = hmac.digest(secret, content, "sha256")[:_SIGNATURE_BYTES]
    return urlsafe_b64encode(content + signature).rstrip(b"=").decode(), signature.hex()


def read_answer_id(text: str, keys: Mapping[int, bytes], oldest: float) -> AnswerRecord:
    """Check an answer id and return what it says.

    Args:
        oldest: answers from before then are expired; in seconds since 1970.

    Raises:
        AnswerIdError: malformed, forged or expired.
    """
    try:
        token = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (Base64Error, ValueError):
        raise AnswerIdError("malformed", "found one that was cut, or text that is no answer id") from None
    content, signature = token[:-_SIGNATURE_BYTES], token[-_SIGNATURE_BYTES:]
    if len(content) < _HEAD.size or content[0] != _FORMAT or urlsafe_b64encode(token).rstrip(b"=").decode() != text:
        raise AnswerIdError("malformed", "found one that was cut, or text that is no answer id")
    _, number, at, nonce, bias_removal, popularity, flags = _HEAD.unpack_from(content)
    secret = keys.get(number)
    if secret is None and at < oldest:
        raise AnswerIdError("expired", "found one whose key is retired")
    if secret is None or not hmac.compare_digest(hmac.digest(secret, content, "sha256")[:_SIGNATURE_BYTES], signature):
        raise AnswerIdError("forged", "found one that was changed or cut, or that another service gave")
    if at < oldest:
        raise AnswerIdError("expired", "found one of an answer that is too old")
    # Signed by this service: what follows is whole.
    release, rest = _text(content, _HEAD.size)
    priors = struct.unpack_from(f"<{content[rest]}f", content, rest + 1)
    rest += 1 + 4 * len(priors)
    codes = struct.unpack_from(f"<{content[rest]}H", content, rest + 1)
    rest += 1 + 2 * len(codes)
    arm = None
    if flags & _IN_ARM:
        (unit,) = _UNIT.unpack_from(content, rest)
        run, rest = _text(content, rest + _UNIT.size)
        name, rest = _text(content, rest)
        arm = ArmAnswer(run, name, unit)
    return AnswerRecord(
        name=signature.hex(),
        release=release,
        at=at,
        bias_removal=bias_removal,
        popularity=popularity,
        priors=priors,
        arm=arm,
        restricted=bool(flags & _RESTRICTED),
        codes=codes,
        propensities={place: 2 ** (-code / _STEPS) for place, code in _DRAWN.iter_unpack(content[rest:])},
        nonce=nonce,
    )


def _codes(labels: Sequence[str], nonce: int) -> list[int]:
    """Hash the CRC-32 of each label's id to 16 bits by multiply-shift [Dietzfelbinger et al. 1997]."""
    return [(zlib.crc32(label.encode("utf-8", "replace")) * nonce & 0xFFFFFFFF) >> 16 for label in labels]


def _code_of(propensity: float) -> int:
    return min(65_535, round(-math.log2(max(propensity, 2.0**-63)) * _STEPS))


def _text(content: bytes, start: int) -> tuple[str, int]:
    """Return a text that follows its length, and the offset after the text."""
    end = start + 1 + content[start]
    return content[start + 1 : end].decode(), end

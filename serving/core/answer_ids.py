"""Create and read answer ids: signed tokens with all that feedback on an answer needs, so no answer is stored.

A token is URL-safe text: base64 of a fixed head, the release's name, the dials of the answer, its first 100 labels as
16 bits each, the propensities of drawn labels, up to 100 labels that were drawn after the first 100, and the first 10
bytes of an HMAC-SHA256. Twenty labels take 107 characters, and each 3 bytes of the release's name 4 more.

The 16 bits of a label depend on the token's own random odd number. So a label that was not in an answer of k labels
passes for one of them with probability k / 65,536, independently for every answer.
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
"""First labels of an answer that its id holds, and most drawn labels after them; others count as not answered."""
_HEAD = struct.Struct("<BBIIfffB")
"""Head of a token: format, key number, time in seconds since 1970, random number, λ, μ, ω, flags."""
_FORMAT = 1
_RESTRICTED, _IN_ARM = 1, 2
_SIGNATURE_BYTES = 10
_UNIT = struct.Struct("<Q")
_DRAWN, _DRAWN_LATER = struct.Struct("<BH"), struct.Struct("<HHH")
"""Position and propensity of a drawn label; position, code and propensity of one after the first 100."""
_STEPS = 1024
"""Steps of a propensity's logarithmic code per power of 2: the relative error is at most 0.04 %."""
Refusal = Literal["malformed", "forged", "expired"]


class AnswerIdError(Exception):
    """An answer id that is forged, cut or expired."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class AnswerRecord:
    """The content of an answer id.

    Attributes:
        name: unique name of the answer.
        at: time of the answer in whole seconds since 1970.
        arm: arm of an experiment, if the answer counts in the comparison of arms.
        restricted: whether the client restricted the eligible labels, or arranged the answer.
        codes: codes of the first 100 labels in order, 16 bits each.
        later: positions of drawn labels after the first 100, by code.
        propensities: P(shown) of drawn labels, by position.
        nonce: random odd number of the labels' codes.
    """

    name: str
    release: str
    at: int
    bias_removal: float
    popularity: float
    cooccurrence: float
    priors: tuple[float, ...]
    arm: ArmAnswer | None
    restricted: bool
    codes: tuple[int, ...]
    later: Mapping[int, int]
    propensities: Mapping[int, float]
    nonce: int

    def positions(self, labels: Sequence[str]) -> list[int | None]:
        """Find the positions of labels in the answer, from 0; None: neither among the first 100 nor drawn."""
        codes = _codes(labels, self.nonce)
        return [self.codes.index(code) if code in self.codes else self.later.get(code) for code in codes]


def sign_answer(
    key: tuple[int, bytes],
    at: float,
    release: bytes,
    weights: Sequence[float],
    labels: Sequence[str],
    *,
    arm: ArmAnswer | None = None,
    restricted: bool = False,
    propensities_K: Float32 | None = None,
) -> tuple[str, str]:
    """Create the id and the name of an answer; the name is the signature, which is unique.

    Args:
        key: number and secret of the signing key.
        at: time of the answer in seconds since 1970.
        release: name of the release that answered, UTF-8, at most 255 bytes.
        weights: λ, μ and ω, and the weights of the release's priors.
        labels: ids of the answered labels, in order, K.
        arm: arm of the answer; recorded only if the answer counts in the comparison of arms.
        restricted: whether no promise holds: the client restricted the eligible labels, or arranged the answer, no
            tower ranked it, or many labels have come or ended since the release was loaded.
        propensities_K: P(shown) of each label, float32 [K]; None: all are 1.
    """
    number, secret = key
    nonce = random.getrandbits(32) | 1  # odd, so that multiplying by it modulo 2^32 is a bijection
    counted = arm if arm is not None and arm.counted else None
    flags = (_RESTRICTED if restricted else 0) | (_IN_ARM if counted else 0)
    drawn = [] if propensities_K is None else np.flatnonzero(propensities_K < 1).tolist()
    drawn_later = [position for position in drawn if position >= MAX_LABELS][:MAX_LABELS]
    all_codes = _codes([*labels[:MAX_LABELS], *(labels[position] for position in drawn_later)], nonce)
    codes, later_codes = all_codes[:MAX_LABELS], all_codes[MAX_LABELS:]
    parts = [
        _HEAD.pack(_FORMAT, number & 255, int(at), nonce, *weights[:3], flags),
        bytes((len(release),)), release,
        struct.pack(f"<B{len(weights) - 3}f", len(weights) - 3, *weights[3:]),
        struct.pack(f"<B{len(codes)}H", len(codes), *codes),
    ]  # fmt: skip
    if counted is not None:
        names = [name.encode() for name in (counted.run, counted.arm)]
        parts += [_UNIT.pack(counted.unit), *(bytes((len(name),)) + name for name in names)]
    if propensities_K is not None:
        first = [position for position in drawn if position < MAX_LABELS]
        parts += [bytes((len(first),))]
        parts += [_DRAWN.pack(position, _encode_propensity(float(propensities_K[position]))) for position in first]
        parts += [
            _DRAWN_LATER.pack(position, code, _encode_propensity(float(propensities_K[position])))
            for position, code in zip(drawn_later, later_codes, strict=True)
        ]
    content = b"".join(parts)
    signature = hmac.digest(secret, content, "sha256")[:_SIGNATURE_BYTES]
    return urlsafe_b64encode(content + signature).rstrip(b"=").decode(), signature.hex()


def read_answer_id(text: str, keys: Mapping[int, bytes], oldest: float) -> AnswerRecord:
    """Check an answer id and return its content.

    Args:
        keys: secrets by key number.
        oldest: time before which answers are expired, in seconds since 1970.

    Raises:
        AnswerIdError: the id is malformed, forged or expired.
    """
    try:
        token = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (Base64Error, ValueError):
        raise AnswerIdError("malformed", "found one that was cut, or text that is no answer id") from None
    content, signature = token[:-_SIGNATURE_BYTES], token[-_SIGNATURE_BYTES:]
    # Base64 ignores unused bits and foreign characters, so only the canonical text of a token is accepted.
    if len(content) < _HEAD.size or content[0] != _FORMAT or urlsafe_b64encode(token).rstrip(b"=").decode() != text:
        raise AnswerIdError("malformed", "found one that was cut, or text that is no answer id")
    _, number, at, nonce, bias_removal, popularity, cooccurrence, flags = _HEAD.unpack_from(content)
    secret = keys.get(number)
    if secret is None and at < oldest:
        raise AnswerIdError("expired", "found one whose key is retired")
    if secret is None or not hmac.compare_digest(hmac.digest(secret, content, "sha256")[:_SIGNATURE_BYTES], signature):
        raise AnswerIdError("forged", "found one that was changed or cut, or that another service gave")
    if at < oldest:
        raise AnswerIdError("expired", "found one of an answer that is too old")
    # The signature is ours, so the content is complete and needs no further checks.
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
    drawn, later = list[tuple[int, int]](), list[tuple[int, int, int]]()
    if rest < len(content):
        end = rest + 1 + content[rest] * _DRAWN.size
        drawn, later = list(_DRAWN.iter_unpack(content[rest + 1 : end])), list(_DRAWN_LATER.iter_unpack(content[end:]))
    drawn_positions = [*drawn, *((position, propensity) for position, _, propensity in later)]
    return AnswerRecord(
        name=signature.hex(),
        release=release,
        at=at,
        bias_removal=bias_removal,
        popularity=popularity,
        cooccurrence=cooccurrence,
        priors=priors,
        arm=arm,
        restricted=bool(flags & _RESTRICTED),
        codes=codes,
        # Reversed, so that of two labels with one code the earlier position stays.
        later={code: position for position, code, _ in reversed(later)},
        propensities={position: 2 ** (-propensity / _STEPS) for position, propensity in drawn_positions},
        nonce=nonce,
    )


def _codes(labels: Sequence[str], nonce: int) -> list[int]:
    """Hash the CRC-32 of each label's id to 16 bits by multiply-shift [Dietzfelbinger et al. 1997]."""
    # Replaced, because a client may choose a label with a lone surrogate.
    return [(zlib.crc32(label.encode("utf-8", "replace")) * nonce & 0xFFFFFFFF) >> 16 for label in labels]


def _encode_propensity(propensity: float) -> int:
    return min(65_535, round(-math.log2(max(propensity, 2.0**-63)) * _STEPS))


def _text(content: bytes, start: int) -> tuple[str, int]:
    """Read a text preceded by its length; returns the text and the offset after it."""
    end = start + 1 + content[start]
    return content[start + 1 : end].decode(), end

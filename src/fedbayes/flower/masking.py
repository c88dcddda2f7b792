"""Secure aggregation: nodes add masks that cancel in the sum, so the server learns a total and nothing else.

The protocol is SecAgg+ on the complete graph (Bonawitz et al. 2017; Bell et al. 2020), in four exchanges: public keys;
encrypted shares of each node's two secrets; masked vectors; the shares that remove the masks of those who dropped out
(pairwise) and of those who did not (their own). Key pairs, key agreement, encryption and secret sharing are Flower's
(P-384, HKDF-SHA256, Fernet, Shamir). Masks are ChaCha20 key streams from ``cryptography``: Flower's own generator folds
the 256-bit seed into 32 bits of a Mersenne twister, which can be searched through.

Everything here is pure: no messages, no Flower app. Vectors are integers modulo 2^64 or 2^32.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from ..errors import ConfigError, RunError

SHARE_SIZES = {"seed": 52, "key": 324}
"""Bytes of a share: an index of four and, in blocks of 16, the padded secret (32 bytes of seed, 306 of a PEM key)."""
LEAST_PARTIES = 2
"""Fewest nodes a total may stand for; with one it would be that node's own numbers."""


# -- numbers to integers and back --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as integers modulo 2^bits with a fixed step, wide enough for the sum of ``parties`` of them.

    64 bits: step 2^-32, a single number may reach 2^31 / parties. 32 bits: step 2^-18, reach 2^13 / parties. Rounding to
    the nearest step errs by at most step / 2 a party, so a total by at most parties * step / 2.
    """

    bits: int
    parties: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ConfigError(f"transport.mask_bits = {self.bits}: it must be 32 or 64.")

    @property
    def step(self) -> float:
        """Distance between neighbouring numbers."""
        return 2.0**-32 if self.bits == 64 else 2.0**-18

    @property
    def reach(self) -> float:
        """Largest magnitude one party may send."""
        return 2.0 ** (self.bits - 1) * self.step / self.parties

    @property
    def error(self) -> float:
        """Bound on the error of a total."""
        return self.parties * self.step / 2

    @property
    def dtype(self) -> np.dtype:
        """Unsigned integers, whose overflow is the modulus."""
        return np.dtype(np.uint64 if self.bits == 64 else np.uint32)

    def encode(self, vector: np.ndarray) -> np.ndarray:
        """Round to steps; a number out of reach or not finite is refused rather than cut off.

        The sentence goes to the server, so it does not say how large the number is.
        """
        if not float(np.abs(vector).max(initial=0.0)) < self.reach:
            wider = "use transport.mask_bits = 64 or " if self.bits == 32 else ""
            raise RunError(
                f"a statistic cannot be masked with {self.bits} bits among {self.parties} nodes: it is above "
                f"{self.reach:.3g} global sigmas (a collapsed posterior has very small ones); {wider}bound it with privacy.clip."
            )
        return np.rint(vector / self.step).astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Read a sum of encoded vectors."""
        signed = total.view(np.int64 if self.bits == 64 else np.int32)
        return signed.astype(np.float64) * self.step


def key_stream(key: bytes, size: int, dtype: np.dtype) -> np.ndarray:
    """Return ``size`` uniform integers: the ChaCha20 key stream of a 32-byte key that is used once."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size * dtype.itemsize))
    return np.frombuffer(stream, dtype=dtype.newbyteorder("<")).astype(dtype)


# -- one node's part ---------------------------------------------------------------------------------------------


@dataclass
class Party:
    """One node in one aggregation: its secrets, and what the others entrusted to it."""

    number: int
    threshold: int
    masking_key: bytes
    sealing_key: bytes
    own_seed: bytes
    publics: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    seed_shares: dict[int, bytes] = field(default_factory=dict)
    key_shares: dict[int, bytes] = field(default_factory=dict)
    stage: str = "keys"

    @staticmethod
    def begin(number: int, threshold: int) -> tuple[Party, tuple[bytes, bytes]]:
        """Make fresh keys; return the party and its two public keys (for masks, for sealing shares)."""
        masking, public_masking = generate_key_pairs()
        sealing, public_sealing = generate_key_pairs()
        party = Party(number, threshold, private_key_to_bytes(masking), private_key_to_bytes(sealing), os.urandom(32))
        return party, (public_key_to_bytes(public_masking), public_key_to_bytes(public_sealing))

    def share(self, publics: Mapping[int, tuple[bytes, bytes]]) -> dict[int, bytes]:
        """Share the own seed and masking key among all parties; return the sealed share for each of the others."""
        self._advance("keys", "shares")
        flat = [key for pair in publics.values() for key in pair]
        if (
            len(publics) < max(self.threshold, LEAST_PARTIES)
            or len(set(flat)) != len(flat)
            or self.number not in publics
        ):
            raise RunError("secure aggregation: too few parties, or keys that are not theirs; nothing was sent.")
        if self.threshold <= len(publics) // 2:
            raise RunError(
                "secure aggregation: a threshold of half the parties or fewer would let the server unmask anyone."
            )
        self.publics = dict(publics)
        order = sorted(publics)
        seeds = create_shares(self.own_seed, self.threshold, len(order))
        keys = create_shares(self.masking_key, self.threshold, len(order))
        sealed = {}
        for i, other in enumerate(order):
            if other == self.number:
                self.seed_shares[other], self.key_shares[other] = seeds[i], keys[i]
                continue
            plain = share_keys_plaintext_concat(self.number, other, seeds[i], keys[i])
            sealed[other] = encrypt(self._sealing_secret(other), plain)
        return sealed

    def mask(self, vector: np.ndarray, sealed: Mapping[int, bytes]) -> np.ndarray:
        """Open the shares of those still taking part and return the vector under its masks."""
        self._advance("shares", "masked")
        for other, box in sealed.items():
            try:
                plain = decrypt(self._sealing_secret(other), box)
            except InvalidToken:
                raise RunError(
                    f"secure aggregation: the share of node {other} cannot be opened; nothing was sent."
                ) from None
            source, target, seed_share, key_share = share_keys_plaintext_separate(plain)
            if (source, target) != (other, self.number):
                raise RunError("secure aggregation: a share came from or went to the wrong node; nothing was sent.")
            self.seed_shares[other], self.key_shares[other] = seed_share, key_share
        if len(self.seed_shares) < max(self.threshold, LEAST_PARTIES):
            raise RunError("secure aggregation: too few parties are left; nothing was sent.")
        masked = vector + key_stream(self.own_seed, len(vector), vector.dtype)
        for other in sealed:
            secret = pairwise_secret(self.masking_key, self.publics[other][0])
            mask = key_stream(secret, len(vector), vector.dtype)
            masked = masked + mask if self.number > other else masked - mask
        return masked

    def reveal(self, present: Sequence[int], dropped: Sequence[int]) -> dict[int, bytes]:
        """Return shares: of the own mask's seed for those in the sum, of the masking key for those who dropped out.

        Once only, and never both for one party: that would unmask it.
        """
        self._advance("masked", "done")
        if set(present) & set(dropped) or len(set(present)) < max(self.threshold, LEAST_PARTIES):
            raise RunError("secure aggregation: these shares would reveal a single node's numbers; they were not sent.")
        if self.number not in present or not set(present) | set(dropped) <= self.seed_shares.keys():
            raise RunError("secure aggregation: shares were asked for nodes that are not part of this sum.")
        return {p: self.seed_shares[p] for p in present} | {p: self.key_shares[p] for p in dropped}

    def _sealing_secret(self, other: int) -> bytes:
        return generate_shared_key(bytes_to_private_key(self.sealing_key), bytes_to_public_key(self.publics[other][1]))

    def _advance(self, expected: str, following: str) -> None:
        if self.stage != expected:
            raise RunError(f"secure aggregation: stage '{following}' was asked for in stage '{self.stage}'.")
        self.stage = following


def pairwise_secret(private: bytes, public: bytes) -> bytes:
    """The 32-byte key two parties agree on (ECDH over P-384, HKDF-SHA256)."""
    return base64.urlsafe_b64decode(generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public)))


# -- the server's part -------------------------------------------------------------------------------------------


def threshold_of(parties: int) -> int:
    """Shares needed to unmask: two thirds of the parties (more than half, at least two), so a third may drop out."""
    return max(LEAST_PARTIES, math.ceil(2 * parties / 3), parties // 2 + 1)


def unmask(
    total: np.ndarray,
    publics: Mapping[int, tuple[bytes, bytes]],
    present: Sequence[int],
    dropped: Sequence[int],
    shares: Mapping[int, Sequence[bytes]],
    threshold: int,
) -> np.ndarray:
    """Take the masks off the sum of the vectors of ``present``; ``shares`` are the revealed ones, by whose secret."""
    for party in [*present, *dropped]:
        if len(shares.get(party, ())) < threshold:
            raise RunError(
                f"secure aggregation: only {len(shares.get(party, ()))} nodes answered at the end and {threshold} are needed "
                "to take the masks off; the round's sum is lost."
            )
    for party in present:
        seed = _combined(shares[party], threshold, party)
        total = total - key_stream(seed, len(total), total.dtype)
    for party in dropped:
        private = _combined(shares[party], threshold, party)
        for other in present:
            mask = key_stream(pairwise_secret(private, publics[other][0]), len(total), total.dtype)
            total = total - mask if other > party else total + mask
    return total


def _combined(shares: Sequence[bytes], threshold: int, party: int) -> bytes:
    """Put a secret together; a share of the right form may still be a wrong one."""
    try:
        return combine_shares(list(shares)[:threshold])
    except ValueError:
        raise RunError(
            f"secure aggregation: the shares of node {party}'s secret do not fit together, so a node sent a wrong one; the "
            "round's sum is lost."
        ) from None


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise ``ValueError`` unless these are P-384 public keys."""
    for key in keys:
        try:
            public = bytes_to_public_key(key)
        except UnsupportedAlgorithm as error:
            raise ValueError(str(error)) from None
        if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp384r1":
            raise ValueError("a key of another kind")


def check_share(share: bytes, kind: str, index: int) -> None:
    """Raise ``ValueError`` unless a share has the form that the party of this index (from 1) would give it."""
    if len(share) != SHARE_SIZES[kind] or int.from_bytes(share[:4], "little") != index:
        raise ValueError("a share of another form")

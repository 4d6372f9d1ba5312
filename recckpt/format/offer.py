"""The offer of a form: a whole checkpoint that is not committed yet (docs/format.md, section 12.6)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from recckpt.format import layout
from recckpt.format.codec import Checksum, CkptId, FileKind, JsonRecord, parse, plain
from recckpt.format.manifest import Content, content_json, content_of

MAX_BYTES = 64 << 20  # part of the format: as the manifest that it becomes
KIND = FileKind("recckpt-offer", 1, "offer_xxh3", MAX_BYTES)  # part of the format
FIRST_BYTES = 1 << 16  # more than the first file of an offer has


class Offered(JsonRecord, frozen=True):
    """The delta that an offer is a form of."""

    ckpt_id: CkptId
    save_id: str
    manifest: Checksum  # of its manifest


@dataclass(frozen=True, kw_only=True)
class Offer(Content):
    """All that the manifest of a form needs and its committer does not know."""

    save_id: str  # which catalogs and indexes repeat
    of: Offered
    step: int | None

    @property
    def directory(self) -> str:
        return layout.offer_dir(self.of.ckpt_id, self.save_id)


def encode(offer: Offer) -> bytes:
    return KIND.encode({"save_id": offer.save_id, "of": plain(offer.of), "step": offer.step, **content_json(offer)})


def decode(data: bytes, path: str) -> Offer:
    """Return the offer in ``data``, the bytes of the file ``path``.

    Raises:
        CorruptCheckpointError: it is not a whole, sealed and consistent offer.
        FormatVersionError: written by a newer format.
    """
    document = KIND.open(data, path)
    save_id, of, step = document.text("save_id"), document.read(Offered, "of"), document.maybe_count("step")
    return Offer(save_id=save_id, of=of, step=step, **content_of(document, of_delta=False))


def encode_first(ckpt_id: str, save_id: str) -> bytes:
    """Return the bytes of ``OFFER``, the first file of an offer, whose age counts."""
    return json.dumps({"save_id": save_id, "ckpt_id": ckpt_id}).encode()


def decode_first(data: bytes, path: str) -> tuple[str, str]:
    """Return the checkpoint id and the save id in the bytes of ``OFFER``; CorruptCheckpointError for other bytes."""
    first = parse(data, path)
    return first.text("ckpt_id"), first.text("save_id")

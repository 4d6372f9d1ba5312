"""The offer of a form: a whole checkpoint that is not committed yet (docs/format.md, section 12.6)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.json_fields import check_seal, parse, seal
from recckpt.format.manifest import Content, content_json, parse_content

FORMAT = "recckpt-offer"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 64 << 20  # part of the format: as of the manifest that it becomes
FIRST_BYTES = 1 << 16  # more than the first file of an offer has
_SEAL = "offer_xxh3"  # part of the format


@dataclass(frozen=True)
class Offered:
    """The delta that an offer is a form of."""

    ckpt_id: str
    save_id: str
    manifest: int  # checksum of its manifest


@dataclass(frozen=True, kw_only=True)
class Offer(Content):
    """All that the manifest of a form needs and its committer does not know."""

    save_id: str  # which catalogs and indexes repeat
    of: Offered
    step: int | None

    @property
    def directory(self) -> str:
        """Where it lies."""
        return layout.offer_dir(self.of.ckpt_id, self.save_id)


def encode(offer: Offer) -> bytes:
    """Return the bytes of ``offer.json``, sealed with their own checksum."""
    of = {"ckpt_id": offer.of.ckpt_id, "save_id": offer.of.save_id, "manifest": f"{offer.of.manifest:016x}"}
    head = {"format": FORMAT, "version": VERSION, "save_id": offer.save_id, "of": of, "step": offer.step}
    return seal({**head, **content_json(offer)}, _SEAL)


def decode(data: bytes, path: str) -> Offer:
    """Return the offer in ``data``, the bytes of the file ``path``.

    Raises:
        CorruptCheckpointError: it is not a whole, sealed and consistent offer.
        FormatVersionError: written by a newer format.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpointError(path, "its size", found=f"over {MAX_BYTES} bytes", expected="less")
    fields = parse(data, path)
    fields.check_format(FORMAT, VERSION)  # before the seal, as of a manifest
    check_seal(data, _SEAL, path)
    of = fields.mapping("of")
    ckpt_id = of.text("ckpt_id")
    try:
        layout.encode_id(ckpt_id)
    except ValueError as error:
        raise of.wrong("ckpt_id", str(error), "a checkpoint id") from error
    offered = Offered(ckpt_id, of.text("save_id"), of.checksum("manifest"))
    content = parse_content(fields, of_delta=False).content
    return Offer(save_id=fields.text("save_id"), of=offered, step=fields.maybe_count("step"), **content)


def encode_first(ckpt_id: str, save_id: str) -> bytes:
    """Return the bytes of ``OFFER``, the first file of an offer, whose age counts."""
    return json.dumps({"save_id": save_id, "ckpt_id": ckpt_id}).encode()


def decode_first(data: bytes, path: str) -> tuple[str, str]:
    """Return the checkpoint id and the save id in the bytes of ``OFFER``; CorruptCheckpointError for other bytes."""
    fields = parse(data, path)
    return fields.text("ckpt_id"), fields.text("save_id")

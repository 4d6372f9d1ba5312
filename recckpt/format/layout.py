"""The names on disk; no other file creates or parses them. Part of the format."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import PurePosixPath
from urllib.parse import quote, unquote

from recckpt.errors import CorruptCheckpointError

INDEX_FILE = "checkpoint"
TIMELINE = "timeline.jsonl"
MANIFEST = "manifest.json"
INTENT = "INTENT"
OFFER_JSON = "offer.json"
MODEL = "model.pt"
EXTRA = "extra.pt"
SPARSE_OPTIM = "sparse_optim"  # part of the format: the name in extra.pt of the sparse optimizer's scalars
SPARSE_LR = "sparse_lr_"  # a prefix: with the number of a group of that optimizer, its learning rate in the state
STEP_PREFIX = "ckpt"  # prefix of the ids that a manager gives by default
SPARSE_DIR = "sparse"
DENSE_DIR = "dense"
OWN_DIR = ".recckpt"  # directory for recckpt's files, never a checkpoint: encode_id gives no name with a leading dot
OWNER_DIR = f"{OWN_DIR}/owner"
PINS_DIR = f"{OWN_DIR}/pins"
FORGET_DIR = f"{OWN_DIR}/forget"
FORGET_KEY = f"{FORGET_DIR}/key"
FORGOTTEN = "forgotten.jsonl"
MIRROR = f"{OWN_DIR}/mirror.json"
MAX_ID_BYTES = 200
_RESERVED_IDS = frozenset({INDEX_FILE, TIMELINE, FORGOTTEN, MANIFEST})  # MANIFEST would make it a checkpoint
_STEP_DIR = re.compile(r"ckpt_(0|[1-9]\d{0,17})(?:\.([1-9]\d*)(?:\.[1-9]\d*)?)?", re.ASCII)
_STEP_ID = re.compile(r"_(0|[1-9]\d{0,17})", re.ASCII)
_OWNER_FILE = re.compile(r"([1-9]\d{0,17})(\.list)?\.json", re.ASCII)
_FORGET_REQUEST = re.compile(r"([0-9a-f]{32})(\.done)?\.json", re.ASCII)
_LATER = re.compile(r"(\.[1-9]\d*){1,2}|\.[0-9a-f]{32}", re.ASCII)
_OF_RANK = re.compile(r"(io_state|rng|extra)_\d+\.pt")
_OFFER_DIR = re.compile(r".+\.[0-9a-f]{32}", re.ASCII)
_DRAFT_OF_PART = re.compile(r"\.arrow\.[0-9a-f]+\.tmp$", re.ASCII)
_OURS = re.compile(
    r"(manifest\.json|INTENT|offer\.json|model\.pt|extra\.pt|(io_state|rng|extra)_\d+\.pt"
    r"|sparse/\d{5,}-of-\d{5,}(\.json|\.(g\d+|deletes)\.\d{2,}\.arrow)|dense/\d{5,}-of-\d{5,}\.(json|bin))"
    r"(\.[0-9a-f]+\.tmp)?"  # suffix of a draft: a mirror has drafts of any file
)
_DRAFT = ".tmp"
_TEMPORARY = re.compile(
    r"(checkpoint|(timeline|forgotten)\.jsonl|\.recckpt/((owner|pins|forget)/[^/]+\.json|mirror\.json|forget/key))"
    r"\.[0-9a-f]{16}\.tmp"
    r"|\.probe-[0-9a-f]{16}(\.tmp)?(\.[0-9a-f]{16}\.tmp)?"
)
_MAX_NAME_CHARS, _MAX_SEGMENT_BYTES = 1024, 255  # limits of file systems
_SAFE = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}(?:/[A-Za-z0-9_][\w.-]{0,99}){0,3}", re.ASCII)  # all our names match it
_UNSAFE = re.compile("[\\\\:\0\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_id(ckpt_id: str) -> str:
    """Return the directory name of a checkpoint id; ValueError if no checkpoint can have this id."""
    if not isinstance(ckpt_id, str) or not ckpt_id:
        raise ValueError(f"a checkpoint id must be a non-empty string, found {ckpt_id!r}")
    if not is_encodable(ckpt_id):
        raise ValueError(f"a checkpoint id must be encodable as UTF-8, found {ckpt_id!r}")
    encoded = encode_name(ckpt_id)
    if len(encoded) > MAX_ID_BYTES:
        raise ValueError(
            f"a checkpoint id must have at most {MAX_ID_BYTES} encoded bytes, found {len(encoded)}: {encoded[:40]}..."
        )
    if encoded in _RESERVED_IDS:
        raise ValueError(f"{ckpt_id!r} is reserved by the format; choose another checkpoint id")
    return encoded


def encode_name(name: str) -> str:
    """Return a non-empty name, escaped for all file systems; the name must be encodable as UTF-8."""
    encoded = quote(name, safe="").replace("~", "%7E")
    return f"%{ord(encoded[0]):02X}{encoded[1:]}" if encoded[0] in ".-" else encoded


def encode_index(ckpt_ids: Iterable[str]) -> bytes:
    return "".join(f"{encode_id(ckpt_id)}\n" for ckpt_id in ckpt_ids).encode()


def attempt_dirs(ckpt_id: str, epoch: int) -> Iterator[str]:
    """Yield the directory names for attempts at a checkpoint by the writer of an epoch, best first."""
    encoded = encode_id(ckpt_id)
    if not is_offer_dir(encoded):  # the list of a takeover names no offers
        yield encoded
    yield f"{encoded}.{epoch}"
    yield from (f"{encoded}.{epoch}.{n}" for n in count(1))


@lru_cache(maxsize=1 << 14)
def is_attempt(directory: str, ckpt_id: str) -> bool:
    """Return whether recckpt gives this name to a directory of an attempt at a checkpoint, or of an offer for it."""
    encoded = encode_id(ckpt_id)
    return directory == encoded or is_later_attempt(directory, encoded)


def is_later_attempt(directory: str, first: str) -> bool:
    return directory.startswith(first) and _LATER.fullmatch(directory, len(first)) is not None


def offer_dir(ckpt_id: str, save_id: str) -> str:
    return f"{encode_id(ckpt_id)}.{save_id}"


def is_offer_dir(directory: str) -> bool:
    """Return whether a directory has the name of an offer. An adopted offer keeps its name."""
    return _OFFER_DIR.fullmatch(directory) is not None


def claim(epoch: int) -> str:
    return f"{OWNER_DIR}/{epoch}.json"


def takeover(epoch: int) -> str:
    return f"{OWNER_DIR}/{epoch}.list.json"


def parse_owner_file(name: str) -> int | None:
    match = _OWNER_FILE.fullmatch(name)
    return int(match[1]) if match else None


def is_claim(name: str) -> bool:
    match = _OWNER_FILE.fullmatch(name)
    return match is not None and match[2] is None


def is_takeover(name: str) -> bool:
    match = _OWNER_FILE.fullmatch(name)
    return match is not None and match[2] is not None


def pin(ckpt_id: str) -> str:
    return f"{PINS_DIR}/{encode_id(ckpt_id)}.json"


def parse_pin(name: str) -> str | None:
    return unquote(name.removesuffix(".json")) if name.endswith(".json") else None


def forget_request(request: str, *, is_done: bool = False) -> str:
    return f"{FORGET_DIR}/{request}{'.done' if is_done else ''}.json"


def parse_forget_request(name: str) -> tuple[str, bool] | None:
    match = _FORGET_REQUEST.fullmatch(name)
    return (match[1], match[2] is not None) if match else None


def step_id(step: int, prefix: str = STEP_PREFIX) -> str:
    return f"{prefix}_{step}"


def step_of_id(ckpt_id: str, prefix: str = STEP_PREFIX) -> int | None:
    match = _STEP_ID.fullmatch(ckpt_id.removeprefix(prefix))
    return int(match[1]) if match and ckpt_id.startswith(prefix) else None


def parse_step(directory: str) -> int | None:
    match = _STEP_DIR.fullmatch(directory)
    return int(match[1]) if match else None


def parse_step_epoch(directory: str) -> int | None:
    match = _STEP_DIR.fullmatch(directory)
    return int(match[2]) if match and match[2] else None


def of_rank(content: str, rank: int) -> str:
    """Return the name of a file that belongs to one rank.

    ``content`` is ``"io_state"``, ``"rng"``, or ``"extra"`` for states of registered objects; ``"checkpoint"`` in a
    checkpoint of the state-dict API.
    """
    return f"{content}_{rank}.pt"


def content_of_rank(name: str) -> str | None:
    match = _OF_RANK.fullmatch(name)
    return match[1] if match else None


def catalog(shard: int, shards: int) -> str:
    return f"{SPARSE_DIR}/{shard:05d}-of-{shards:05d}.json"


def part(shard: int, shards: int, group: int | None, number: int) -> str:
    holds = "deletes" if group is None else f"g{group}"
    return f"{SPARSE_DIR}/{shard:05d}-of-{shards:05d}.{holds}.{number:02d}.arrow"


def holds_deletes(name: str) -> bool:
    return ".deletes." in name


def is_part_of(name: str, catalog: str) -> bool:
    return is_part(name) and name.startswith(f"{catalog.removesuffix('.json')}.")


def pattern_of_parts(name: str) -> str:
    return re.sub(r"\d+-of-\d+(\.g\d+)\.\d+(?=\.arrow$)", r"*\1.*", name)


def dense_index(shard: int, shards: int) -> str:
    return f"{DENSE_DIR}/{shard:05d}-of-{shards:05d}.json"


def dense_data(shard: int, shards: int) -> str:
    return f"{DENSE_DIR}/{shard:05d}-of-{shards:05d}.bin"


def has_tensors(name: str) -> bool:
    return name == MODEL or name.startswith(f"{DENSE_DIR}/")


def is_torch_file(name: str) -> bool:
    return name.endswith(".pt")


def has_rows(name: str) -> bool:
    return name.startswith(f"{SPARSE_DIR}/") or is_part(name)


def is_of_rank(name: str) -> bool:
    """Return whether a file belongs to one shard, such as rows and positions. A rank reads only some of these files."""
    return name.startswith((f"{SPARSE_DIR}/", "io_state_", "rng_", "extra_"))


def is_part(name: str) -> bool:
    return name.endswith(".arrow")


def may_have_rows(name: str) -> bool:
    return is_part(name) or _DRAFT_OF_PART.search(name) is not None


def is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None


def subdirectories(names: Iterable[str]) -> set[str]:
    return {"", *(name.rpartition("/")[0] for name in names)}


def join(*names: str) -> str:
    """Join names below the output dir; an empty name is the dir itself."""
    return "/".join(name for name in names if name)


def temporary(name: str) -> str:
    return f"{name}.{secrets.token_hex(8)}{_DRAFT}"


def probe() -> str:
    return f".probe-{secrets.token_hex(8)}{_DRAFT}"


def is_draft(name: str, of: str | None = None) -> bool:
    """Return whether :func:`temporary` made ``name``; if ``of`` is given, whether for that file."""
    return name.endswith(_DRAFT) and (of is None or name.startswith(f"{of}."))


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def is_encodable(name: str) -> bool:
    """Return whether UTF-8 can encode a name; it cannot encode half a surrogate pair, as in a cut emoji."""
    return _SURROGATE.search(name) is None


def checked_name(name: str, path: str) -> str:
    """Return a name read from the file ``path``; CorruptCheckpointError if it could point outside of the checkpoint."""
    if _SAFE.fullmatch(name):
        return name
    if len(name) > _MAX_NAME_CHARS or _UNSAFE.search(name) or not all(map(_is_plain, name.split("/"))):
        raise CorruptCheckpointError(
            path, "file name", found=f"unsafe path {name[:200]!r}", expected="a relative name inside the checkpoint"
        )
    return str(PurePosixPath(name))


def _is_plain(segment: str) -> bool:
    return segment not in ("", ".", "..") and len(segment.encode()) <= _MAX_SEGMENT_BYTES

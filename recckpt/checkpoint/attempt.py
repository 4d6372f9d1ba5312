"""An attempt at a checkpoint, from an empty directory to a commit or an offer: the one way out (no torch here)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from recckpt.checkpoint.shard_writer import ShardWriter, write_small
from recckpt.errors import CommitNotDurableError, RecckptError, WriterFencedError
from recckpt.format import layout, offer
from recckpt.format.manifest import Content, FileEntry, Manifest
from recckpt.format.offer import Offer, Offered
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, read_checked
from recckpt.output_dir.commit import begin, commit
from recckpt.output_dir.fence import Fence
from recckpt.storage import NewFiles, Storage
from recckpt.storage.retry import RetryPolicy
from recckpt.storage.transfers import VISIBLE


@dataclass(frozen=True)
class Attempt:
    """A directory that no other attempt has written to.

    Attributes:
        storage: the output dir.
        intent: whose attempt it is.
        seq: number of the commit that it is to be, where that is known here.
    """

    storage: Storage
    intent: Intent
    seq: int = 0

    @classmethod
    def begin(
        cls,
        storage: Storage,
        fence: Fence,
        ckpt_id: str,
        *,
        step: int | None,
        overwrite: bool = False,
        base: str | None = None,
    ) -> Attempt:
        """Begin what is to be committed; errors as of :func:`recckpt.output_dir.commit.begin`."""
        intent, seq = begin(storage, fence, ckpt_id, step=step, overwrite=overwrite, base=base)
        return cls(storage, intent, seq)

    @classmethod
    def begin_offer(cls, storage: Storage, of: Manifest) -> Attempt:
        """Begin what is to be offered as a form of a delta."""
        attempt = cls(storage, _intent_of_offer(of))
        storage.make_dir(attempt.directory)
        return attempt

    def mark_offer(self, of: Manifest) -> float | None:
        """Write the first file of an offer, whose age counts; return when that was, by the clock of the storage."""
        first = layout.join(self.directory, layout.OFFER)
        self.storage.put_if_absent(first, offer.encode_first(of.ckpt_id, self.save_id))
        return self.storage.modified(first)

    @property
    def directory(self) -> str:
        """Where it lies in the output dir."""
        return self.intent.directory

    @property
    def save_id(self) -> str:
        """What its files repeat."""
        return self.intent.save_id

    def shard(self, number: int, count: int, files: NewFiles | None = None) -> ShardWriter:
        """Return the writer of one of so many shards, whose files are made in ``files``; None for the storage."""
        return ShardWriter(self.storage, self.intent, number, count, files)

    def write(self, name: str, data: bytes) -> FileEntry:
        """Write a small file, read it back, and return its entry; CorruptCheckpointError where it is another."""
        entry = write_small(self.storage, self.directory, name, data)
        read_checked(self.storage, self.directory, entry)
        return entry

    def commit(self, fence: Fence, record: Manifest, visible: RetryPolicy = VISIBLE) -> Manifest:
        """Commit what was written; errors as of :func:`recckpt.output_dir.commit.commit`."""
        return commit(self.storage, fence, self.directory, record, visible)

    def offer(self, of: Manifest, content: Content) -> None:
        """Offer what was written as a form of a delta, durable by now."""
        path, offered = layout.join(self.directory, layout.OFFER_JSON), Offered(of.ckpt_id, of.save_id, of.xxh3)
        data = offer.encode(Offer(save_id=self.save_id, of=offered, step=of.step, **content.content))
        offer.decode(data, path)  # never offer what no owner would read
        self.storage.put_if_absent(path, data)

    @contextmanager
    def abandoned_on_error(self, is_idle: Callable[[BaseException], bool] = lambda error: True) -> Iterator[None]:
        """Remove what was written where the block fails, unless it is another's to judge.

        Args:
            is_idle: says whether, after an error, no other rank is still writing there.
        """
        try:
            yield
        except (WriterFencedError, CommitNotDurableError):
            raise  # the directory is the new owner's to judge, or holds a checkpoint
        except BaseException as error:
            if is_idle(error):
                self.abandon()
            raise

    def abandon(self) -> None:
        """Remove what was written, so that it takes no room; a failure is logged."""
        rotation.abandon(self.storage, self.directory)

    def withdraw(self) -> None:
        """Remove what was to be offered, its first file last."""
        with suppress(OSError, RecckptError):
            rotation.remove_leftover(self.storage, self.directory, rotation.THREADS)


def _intent_of_offer(of: Manifest) -> Intent:
    save_id = secrets.token_hex(16)
    return Intent(layout.offer_dir(of.ckpt_id, save_id), of.epoch, save_id, of.step)

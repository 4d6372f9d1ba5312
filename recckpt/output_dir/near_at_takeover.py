"""What a writer says of near saves in the list that it publishes as it takes an output dir over."""

from __future__ import annotations

from recckpt.format.near_list import NearList
from recckpt.output_dir.claims import Takeover
from recckpt.output_dir.listing import Listing


class NearAtTakeover:
    """What a writer that takes over says of near saves: here nothing, so that none made before counts any more.

    Rule *forget_names_none*: that is what a forgetting says, and who makes no near saves.
    """

    def look(self) -> None:
        """Look at the near dirs: after the claim, before the output dir is listed (rule *claim_before_list*)."""

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList | None:
        """Return what the list of this takeover says.

        Args:
            listing: what counts in the output dir.
            before: what the list before this one says.
            epoch: of this takeover.
        """
        return None


class PassedOn(NearAtTakeover):
    """That of a tool that trains nothing: what counted counts (rule *tools_pass_near_on*)."""

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList | None:
        """Return what the last list said."""
        return before.near


class NamesNone(NearAtTakeover):
    """That of a run that has forgotten ids: near saves count from this takeover on."""

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList | None:
        """Return a list without names."""
        return NearList(epoch)


VOIDED = NearAtTakeover()
PASSED_ON = PassedOn()
NAMES_NONE = NamesNone()

"""BlockUpkeep: before each step, encodes blocks again whose formats or parameters changed, on the host and in slots.

Formats change by `set_formats`; parameters are trained, or changed by other code (`block_bytes` says how that is
detected). Ctrl-C may interrupt everything here, and the next call goes on: what is left to do follows from what was
done, and is not stored apart.

With train="weights" a change must not meet an update of the same weights. So `load_state_dict` and `state_dict` wait
for updates first, code that edits weights calls `synchronize` before, and an edit that did not wait is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bitplan.formats.codec import check_whole_blocks
from bitplan.plan.names import listed
from bitplan.runtime.streaming.block_bytes import BlockBytes
from bitplan.runtime.streaming.blocks.find import StreamedBlock
from bitplan.runtime.streaming.blocks.formats import BlockFormats, BlockSpecs, Formats, resolve_formats
from bitplan.runtime.streaming.blocks.layout import BlockLayout, lay_out
from bitplan.runtime.streaming.blocks.tree import BlockTree
from bitplan.runtime.streaming.errors import StreamError
from bitplan.runtime.streaming.options import StreamOptions
from bitplan.runtime.streaming.training.host_training import HostTraining
from bitplan.runtime.streaming.transfer.host_memory import HostBlocks
from bitplan.runtime.streaming.transfer.schedule import Slots, check_slots
from bitplan.runtime.streaming.transfer.turns import alone
from bitplan.runtime.streaming.weight_loader import WeightLoader


class BlockUpkeep:
    """The formats, bytes and slots of one stream."""

    def __init__(
        self,
        blocks: list[StreamedBlock],
        specs: BlockSpecs,
        formats: BlockFormats,
        host: HostBlocks,
        loader: WeightLoader,
        training: HostTraining | None,
        options: StreamOptions,
    ) -> None:
        self._blocks, self._specs, self._options = blocks, specs, options
        self._host, self._loader, self._training = host, loader, training
        self._by_name = {block.name: block for block in blocks}
        self._slots, self._vram_bytes, self._is_resized = options.slots, options.vram_bytes, False
        self.formats = formats
        self.pending: BlockFormats | None = None  # formats for the next step
        self.bytes = BlockBytes(host, blocks, training, options.train, loader.device.torch_device)
        self._trees = {block.name: BlockTree(block, loader.device.torch_device) for block in blocks}
        if training is not None:
            training.places_to_send = self._places_to_send

    @property
    def chosen(self) -> BlockFormats:
        """The formats of the next step."""
        return self.formats if self.pending is None else self.pending

    def fitting_formats(self, formats: Formats, current: BlockFormats) -> BlockFormats:
        """The formats, checked against blocks and slots; parameters that are not named have those of `current`."""
        chosen = resolve_formats(formats, self._specs, current)
        layouts, slot_bytes = lay_out_all(self._specs, chosen), self._options.slot_bytes
        for name, layout in zip(self._by_name, layouts, strict=True):
            if slot_bytes is not None and layout.nbytes > slot_bytes:
                raise StreamError(
                    f"{name} would take {layout.nbytes} bytes and a slot has {slot_bytes}: it fits no slot; "
                    "stream with larger slot_bytes, or choose smaller formats"
                )
        return chosen

    def set_slots(self, slots: Slots, vram_bytes: int | None) -> None:
        """Divide the device's memory anew before the next step."""
        check_slots(slots, vram_bytes)
        self._slots, self._vram_bytes, self._is_resized = slots, vram_bytes, True

    def saw_step(self, peak_bytes: int) -> None:
        """After a step: with slots="auto" and no limit of their own, slots are to fit the memory that steps leave."""
        if self._slots == "auto" and self._vram_bytes is None and self._loader.saw_step(peak_bytes):
            self._is_resized = True

    def ran_out(self) -> None:
        """A block ran out of memory: with slots="auto" the next step has fewer slots."""
        if self._slots == "auto" and self._vram_bytes is None:
            self._loader.ran_out()
            self._is_resized = True

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def bring_up_to_date(self) -> None:
        """Before a step, put chosen formats and changed parameters into effect."""
        chosen, before = self.chosen, self.formats
        self._look_at_modules(self._blocks)
        stale = self._stale(self._blocks, chosen)
        if self._is_resized:
            self._wait_for_readers()
            self._loader.free()
            self._loader.is_allocated = self._is_resized = False
        if stale or not self._loader.is_allocated:
            self._prepare(stale)
            try:
                self.write(chosen, stale)
            except Exception:
                self.pending = None
                if chosen != before:
                    self.write(before, self._blocks)
                raise
        self.formats, self.pending = chosen, None

    def bring_block_up_to_date(self, block: StreamedBlock) -> None:
        """The same for one block that computes outside a step; formats chosen for the next step wait."""
        self._loader.mend()
        self._look_at_modules([block])
        stale = self._stale([block], self.formats)
        if stale or not self._loader.is_allocated:
            self._prepare(stale)
            self.write(self.formats, stale)

    def _look_at_modules(self, blocks: Iterable[StreamedBlock]) -> None:
        """Refuse modules that the stream cannot follow; weights that adapters were merged into count as changed."""
        for block in blocks:
            if self._trees[block.name].check():
                self.bytes.unread([block.name])
            self.bytes.refuse_thawed(block)

    def replace_weights(self, formats: BlockFormats, restore: Callable[[], None]) -> None:
        """Change formats and masters; `restore` fills the masters. No update may be under way."""
        self._wait_for_readers()
        for block in self._blocks:
            self.bytes.read(block, into_masters=False)
        before, self.pending = self.formats, None
        try:
            self._allocate(formats, self._blocks)
        except Exception:
            self.write(before, self._blocks)
            raise
        restore()
        self.write(formats, self._blocks)

    def write(self, formats: BlockFormats, blocks: Iterable[StreamedBlock]) -> None:
        """Encode blocks in these formats; slots that hold them become invalid."""
        blocks = list(blocks)
        if self._loader.is_allocated and formats == self.formats:
            self._loader.forget(self._places(blocks))
        else:
            self._allocate(formats, blocks)
        for block in blocks:
            self.bytes.put(block, self._layout_of(block), formats[block.name])
            if self._training is not None:
                self._training.unencoded.discard(block.name)

    def put_updated(self, name: str) -> None:
        """On the optimizer's thread: encode a block whose masters were stepped."""
        block = self._by_name[name]
        self.bytes.put_updated(block, self._layout_of(block), () if self._training is None else self._training.sent)

    def _places_to_send(self, name: str) -> dict[str, Tensor]:
        """The bytes of a block's parameters that are sent in a plain type, where the host has them in memory."""
        layout = self._layout_of(self._by_name[name])
        buffer = self._host.buffer(name, layout)
        if buffer is None:
            return {}
        return {one: piece.parts["data"].view(buffer) for one, piece in layout.pieces.items() if piece.fmt.is_cast}

    def _stale(self, blocks: Iterable[StreamedBlock], formats: BlockFormats) -> list[StreamedBlock]:
        lost = {*self._host.lost(), *(() if self._training is None else self._training.unencoded)}
        return [block for block in blocks if block.name in lost or self.bytes.is_stale(block, formats[block.name])]

    def _prepare(self, stale: list[StreamedBlock]) -> None:
        """Before bytes are written: read the parameters, and wait until no copy reads the old bytes."""
        self._refuse_racing(stale)
        if self._training is not None:
            self._training.finish()
        self._wait_for_readers()
        for block in stale:
            self.bytes.read(block)

    def _wait_for_readers(self) -> None:
        self._loader.mend()
        self._loader.wait_for_copies(self._loader.transfers())

    def _allocate(self, formats: BlockFormats, changed: Iterable[StreamedBlock]) -> None:
        options, layouts = self._options, lay_out_all(self._specs, formats)
        self._loader.is_allocated = False  # from here on the layouts are not those of `formats`
        self.formats = formats
        self._loader.allocate(layouts, self._slots, options.slot_bytes, self._vram_bytes, self._places(changed))

    def _places(self, blocks: Iterable[StreamedBlock]) -> set[int]:
        return {self._loader.names.index(block.name) for block in blocks}

    def _layout_of(self, block: StreamedBlock) -> BlockLayout:
        return self._loader.layouts[self._loader.names.index(block.name)]

    # ---- weights that are trained ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for updates, and make the model's Parameters the weights as they were trained."""
        if self._training is not None:
            self._refuse_racing(self._blocks)
            self._training.settle(self._by_name)

    def hook_state_dicts(self) -> list[RemovableHandle]:
        """With train="weights": the model's state_dict holds trained weights, and load_state_dict waits for updates.
        Both find Parameters in all modules, after Ctrl-C too.
        """
        hooks = []
        for block in self._blocks:
            hooks.append(block.module.register_state_dict_pre_hook(functools.partial(self._before_saving, block)))
            hooks.append(block.module.register_load_state_dict_pre_hook(functools.partial(self._before_loading, block)))
        return hooks

    @alone
    def _before_saving(self, block: StreamedBlock, *_: Any) -> None:
        block.put_back()
        self.settle()

    @alone
    def _before_loading(self, block: StreamedBlock, *_: Any) -> None:
        block.put_back()
        if self._training is not None:
            self._training.settle(self._by_name)

    def refuse_changes_within(self, step: int) -> None:
        """Refuse weights that changed within a step: its gradients are those of the weights it began with."""
        if self._training is not None:
            self._look_at_modules(self._blocks)
        names = [f"{block.name}.{name}" for block in self._blocks for name in self._changed_masters(block)]
        if names:
            raise StreamError(
                f"{listed(names)} changed within step {step}, whose gradients are of the weights before: begin_step "
                "drops the step; change weights between synchronize() and begin_step"
            )

    def _refuse_racing(self, blocks: Iterable[StreamedBlock]) -> None:
        """Refuse weights that were changed while an update was under way; raised once."""
        training = self._training
        if training is None or training.is_settled:
            return
        changed = {block.name: self._changed_masters(block) for block in blocks}
        names = [f"{block}.{name}" for block, tensors in changed.items() for name in tensors]
        if not names:
            return
        for block, tensors in changed.items():
            if tensors:
                self.bytes.read(self._by_name[block], into_masters=False)
        training.settle(self._by_name)
        raise StreamError(
            f"{listed(names)} changed after end_step and before synchronize(), while the update of the step was under "
            "way: which of the two is in it is not certain; call synchronize() before you change weights. Load the "
            "weights again, or go on with what the model holds now"
        )

    def _changed_masters(self, block: StreamedBlock) -> list[str]:
        training = self._training
        changed = [] if training is None else self.bytes.changed(block)
        return [name for name in changed if training is not None and training.trains(block.name, name)]


def lay_out_all(specs: BlockSpecs, formats: BlockFormats) -> list[BlockLayout]:
    """The layout of every block in these formats; formats that cannot hold a parameter are refused."""
    for block, names in formats.items():
        for name, fmt in names.items():
            check_whole_blocks(fmt, specs[block][name].shape, None, f"{block}.{name}")
    return [lay_out(specs[block], names) for block, names in formats.items()]

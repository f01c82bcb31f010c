"""BlockUpkeep: before each step, encodes blocks again whose formats or parameters changed, on the host and in slots.

Formats change by `set_formats`; parameters are trained, or changed by other code. At every boundary each parameter is
checked, in a few microseconds and without reading its numbers:

    which Parameter its module holds    module.weight = nn.Parameter(...), load_state_dict(assign=True)
    torch's count of its writes         load_state_dict, and copy_, add_, ... under torch.no_grad()
    where its numbers lie               parameter.data = other
    adapters merged into the block      peft's merge_adapter, unmerge_adapter, merge_and_unload (`BlockTree`)

Torch counts no writes through `.data` (`parameter.data.mul_(2)`) or through NumPy: `BlockStream.refresh` is for those.
A module that takes the place of a streamed one, and adapters that come into a block and lie on the host, are refused by
name (`BlockTree`): the stream would go on to send other weights. What changes no streamed weight is accepted.

The parameters are the truth (with train="weights" their FP32 masters): every new format of a block is made from them,
never from another format. Where a parameter is sent in its own type, the host's bytes are the parameter: it becomes a
view of them, and RAM holds it once. With a GPU the encoding is done there, some rows at a time, with the same codes.

Ctrl-C may interrupt everything here, and the next call goes on: a block leaves the list of written blocks before its
bytes are written, and enters it when they are complete. With train="weights" a change must not meet an update of the
same weights: `load_state_dict` and `state_dict` wait for updates first, code that edits weights calls `synchronize`
before, and an edit that did not wait is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.base.errors import StreamError
from bitplan.base.weight_changes import count_optimizer_steps, state_of
from bitplan.formats.codec import check_whole_blocks
from bitplan.formats.dispatch import encode
from bitplan.formats.format import Format
from bitplan.plan.names import listed
from bitplan.streaming.find_blocks import BlockLayout, Piece, StreamedBlock, StreamedParameter, lay_out
from bitplan.streaming.options import BlockFormats, BlockSpecs, Formats, StreamRequest, own_format, resolve_formats
from bitplan.streaming.transfer.copies import alone
from bitplan.streaming.transfer.schedule import Slots, check_slots
from bitplan.streaming.weight_loader import WeightLoader

REPLACED: tuple[Any, ...] = ()
ROWS_AT_A_TIME_BYTES = 2**25


def current_parameter(full_name: str, one: StreamedParameter) -> nn.Parameter:
    """Return the Parameter that all modules with `one` hold."""
    parameters: dict[int, nn.Parameter] = {}
    one.put_back()
    for module, local in one.uses:
        parameter = module._parameters.get(local)
        if parameter is None:
            raise StreamError(f"{full_name} is gone from its module; close the stream and stream again")
        parameters[id(parameter)] = parameter
    if len(parameters) > 1:
        raise StreamError(
            f"{full_name} has {len(one.uses)} places in its block, and only some hold the new Parameter; replace it "
            "in all of them"
        )
    return next(iter(parameters.values()))


def _look_at_block(block: StreamedBlock) -> dict[str, tuple[Any, ...]]:
    return {name: look_at(one) for name, one in block.parameters.items()}


def look_at(one: StreamedParameter) -> tuple[Any, ...]:
    parameter = one.parameter
    for module, local in one.uses:
        if module._parameters.get(local) is not parameter:
            one.put_back()
            if module._parameters.get(local) is not parameter:
                return REPLACED
    return id(parameter), *state_of(parameter)


def _encode_into(piece: Piece, buffer: Tensor, numbers: Tensor, device: torch.device, name: str) -> None:
    rows = numbers.shape[0] if numbers.dim() == 2 else 0
    by_rows = rows and all(part.shape[:1] == (rows,) for part in piece.parts.values())
    if device.type != "cuda" or not by_rows or piece.fmt.block.rows != 1:
        piece.write(buffer, encode(numbers, piece.fmt, name=name))
        return
    views = {part_name: part.view(buffer) for part_name, part in piece.parts.items()}
    step = max(1, ROWS_AT_A_TIME_BYTES // (numbers.shape[1] * numbers.itemsize))
    for first in range(0, rows, step):
        encoded = encode(numbers[first : first + step].to(device), piece.fmt, name=name)
        for part_name, part in encoded.parts.items():
            views[part_name][first : first + step].copy_(part)


MERGED = "merged_adapters"  # of peft's layers: the names of adapters that are in the weight now


class _Seen(NamedTuple):
    """A module, its children and the names of its parameters when it was last looked at."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    parameters: frozenset[str]


class BlockTree:
    """The modules of one block as they were last seen, to notice changes in under a microsecond each."""

    def __init__(self, block: StreamedBlock, device: torch.device) -> None:
        self._block, self._device = block, device
        self._seen = _look(block.module)
        self._merged = self._look_at_merged()

    def check(self) -> bool:
        """Whether adapters were merged into weights, or taken out; refuses modules that cannot be followed."""
        for module, children, parameters in self._seen:
            if module._modules != children or module._parameters.keys() != parameters:
                self._refuse_replaced()
                self._refuse_elsewhere()
                self._seen = _look(self._block.module)
                break
        before, self._merged = self._merged, self._look_at_merged()
        return any(self._merged.get(module) != names for module, names in before.items())

    def _look_at_merged(self) -> dict[nn.Module, tuple[str, ...]]:
        return {one.module: tuple(one.module.__dict__[MERGED]) for one in self._seen if MERGED in one.module.__dict__}

    def _refuse_replaced(self) -> None:
        name, present = self._block.name, set(self._block.module.modules())
        for one in self._block.streamed:
            if any(module not in present for module, _ in one.uses):
                raise StreamError(
                    f"{name}.{one.name}: its module was replaced or taken out of the block, and the stream would go "
                    "on to send its weights; close the stream, change the model, and stream again"
                )

    def _refuse_elsewhere(self) -> None:
        streamed = {(id(module), local) for one in self._block.streamed for module, local in one.uses}
        for path, module in self._block.module.named_modules():
            for local, parameter in module._parameters.items():
                if parameter is None or (id(module), local) in streamed or parameter.device == self._device:
                    continue
                full_name = ".".join(part for part in (self._block.name, path, local) if part)
                raise StreamError(
                    f"{full_name} came into a streamed block and is on {parameter.device}: what is not streamed "
                    f"belongs on {self._device}; move it there, or close the stream and stream again"
                )


def _look(block: nn.Module) -> list[_Seen]:
    return [_Seen(one, dict(one._modules), frozenset(one._parameters)) for one in block.modules()]


def mergeable_in(block: StreamedBlock) -> list[nn.Module]:
    """The modules of a block whose adapters peft can merge; found once, for a block may have a hundred modules."""
    return [module for module in block.module.modules() if MERGED in module.__dict__]


def refuse_unmerging(name: str, mergeable: Iterable[nn.Module]) -> None:
    """Raise for merged adapters that are switched off: peft would take them out of a copy of the weight."""
    for module in mergeable:
        if module.__dict__.get(MERGED) and module.__dict__.get("_disable_adapters"):
            raise StreamError(
                f"{name}: merged adapters are switched off (disable_adapter); call unmerge_adapter() first"
            )


def _refuse_own(full_name: str, _gradients: object) -> None:
    raise StreamError(
        f"{full_name} has got a gradient from outside its block's forward (a penalty on weights, a hook on the block, "
        "a call of a module within it), and such gradients do not train streamed weights; compute that in the block's "
        "forward, give AdamWSettings(weight_decay=...) for a penalty, or keep this block out of the stream"
    )


class BlockUpkeep:
    """Keeps a stream's bytes on the host up to date with the model's parameters, and applies new formats and slots."""

    def __init__(
        self, blocks: list[StreamedBlock], formats: BlockFormats, loader: WeightLoader, options: StreamRequest
    ) -> None:
        self._blocks, self._options = blocks, options
        self._specs: BlockSpecs = {block.name: block.specs for block in blocks}
        self._host, self._loader, self._training = loader.host, loader, loader.training
        self._by_name = {block.name: block for block in blocks}
        self._slots, self._vram_bytes, self._is_resized = options.slots, options.vram_bytes, False
        self.formats = formats
        self.pending: BlockFormats | None = None  # formats for the next step
        self._device = loader.device.torch_device
        count_optimizer_steps()  # torch does not count the writes of a fused optimizer
        self._seen = {block.name: _look_at_block(block) for block in blocks}
        self._written: dict[str, Mapping[str, Format]] = {}  # blocks whose bytes are complete, and their formats
        self._unread: set[str] = set()  # blocks whose parameters always count as changed
        self._sent_from: dict[str, tuple[BlockLayout, Tensor, dict[str, Tensor]]] = {}  # of `_buffers_to_send`
        self._trees = {block.name: BlockTree(block, self._device) for block in blocks}
        self._guards: dict[str, tuple[nn.Parameter, Any, RemovableHandle]] = {}  # by full name; see `_refuse_gradients`
        if self._training is not None:
            self._training.buffers_to_send = self._buffers_to_send

    @property
    def chosen(self) -> BlockFormats:
        """Return the formats that the next step will use."""
        return self.formats if self.pending is None else self.pending

    def fitting_formats(self, formats: Formats, current: BlockFormats) -> BlockFormats:
        """The formats, checked against blocks and slots; parameters that are not named have those of `current`."""
        chosen = formats_of(formats, self._blocks, current)
        layouts, slot_bytes = lay_out_all(self._specs, chosen), self._options.slot_bytes
        for name, layout in zip(self._by_name, layouts, strict=True):
            if slot_bytes is not None and layout.nbytes > slot_bytes:
                raise StreamError(
                    f"{name} would take {layout.nbytes} bytes and a slot has {slot_bytes}: it fits no slot; "
                    "stream with larger slot_bytes, or choose smaller formats"
                )
        return chosen

    def set_slots(self, slots: Slots, vram_bytes: int | None) -> None:
        """Have the device's memory divided into other slots before the next step."""
        check_slots(slots, vram_bytes)
        self._slots, self._vram_bytes, self._is_resized = slots, vram_bytes, True

    def saw_step(self, peak_bytes: int) -> None:
        """Note that a step ended: with slots="auto" and no limit given, slots are made to fit what it left."""
        if self._slots == "auto" and self._vram_bytes is None and self._loader.saw_step(peak_bytes):
            self._is_resized = True

    def ran_out(self) -> None:
        """Note that a block ran out of memory: with slots="auto" the next step has fewer slots."""
        if self._slots == "auto" and self._vram_bytes is None:
            self._loader.ran_out()
            self._is_resized = True

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def bring_up_to_date(self) -> None:
        """Put chosen formats and changed parameters into effect."""
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
        """Put changed parameters of one block, which computes outside a step, into effect; chosen formats wait."""
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
                self.unread([block.name])
            self._refuse_thawed_weights(block)

    def replace_weights(self, formats: BlockFormats, restore: Callable[[], None]) -> None:
        """Change formats and masters; `restore` fills the masters. No update may be under way."""
        self._wait_for_readers()
        for block in self._blocks:
            self._read(block, into_masters=False)
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
            self._loader.forget(self._indices_of(blocks))
        else:
            self._allocate(formats, blocks)
        for block in blocks:
            self._written.pop(block.name, None)
            self._put(block)
            self._note(block)  # a parameter that is sent in its own type has become a view of the buffer
            self._written[block.name] = dict(formats[block.name])
            if self._training is not None:
                self._training.unencoded.discard(block.name)

    def put_updated(self, name: str) -> None:
        """Encode, on the optimizer's thread, a block whose masters were stepped, but for those that the step sent."""
        block, sent = self._by_name[name], () if self._training is None else self._training.sent
        try:
            self._put(block, sent)
        except BaseException:
            self._written.pop(name, None)
            raise

    def _put(self, block: StreamedBlock, written: Collection[str] = ()) -> None:
        """Encode a block into the host's buffer, but for parameters that are `written` there.

        It detaches what it reads instead of using torch.no_grad(), which Ctrl-C could leave on for the rest of the run.
        """
        layout = self._layout_of(block)
        buffer = self._host.put(block.name, layout, lambda buffer: self._fill(block, layout, buffer, written))
        if buffer is None:
            return
        for name, piece in layout.pieces.items():
            parameter = block.parameters[name].parameter
            is_master = self._trains(block, name) and parameter.dtype == torch.float32
            if piece.is_own_type and not is_master:
                part = piece.parts["data"]
                if parameter.data_ptr() != buffer.data_ptr() + part.offset:
                    parameter.data = part.view(buffer)

    def _fill(self, block: StreamedBlock, layout: BlockLayout, buffer: Tensor, written: Collection[str]) -> None:
        for name, piece in layout.pieces.items():
            if name in written:
                continue
            parameter = block.parameters[name].parameter
            if self._training is not None and self._trains(block, name):
                source = self._training.weight(block.name, name).source(is_own_type=piece.is_own_type)
                if not piece.fmt.is_cast:
                    piece.write(buffer, encode(source, piece.fmt, name=f"{block.name}.{name}"))
                elif (target := piece.parts["data"].view(buffer)).data_ptr() != source.data_ptr():
                    target.copy_(source)
            elif piece.is_own_type:
                piece.parts["data"].view(buffer).copy_(parameter.detach())
            else:
                _encode_into(piece, buffer, parameter.detach(), self._device, f"{block.name}.{name}")

    def _trains(self, block: StreamedBlock, name: str) -> bool:
        return self._training is not None and self._training.trains(block.name, name)

    def _buffers_to_send(self, name: str) -> dict[str, Tensor]:
        """Return the host's memory of parameters that are sent in a plain type, if the host has them there."""
        layout = self._layout_of(self._by_name[name])
        buffer = self._host.buffer(name, layout)
        if buffer is None:
            return {}
        layout_before, buffer_before, views = self._sent_from.get(name, (None, None, {}))
        if layout is not layout_before or buffer is not buffer_before:
            views = {one: piece.parts["data"].view(buffer) for one, piece in layout.pieces.items() if piece.fmt.is_cast}
            self._sent_from[name] = layout, buffer, views
        return views

    def close(self) -> None:
        """Free the host's memory of the stream."""
        self._sent_from.clear()
        for _, _, hook in self._guards.values():
            hook.remove()
        self._guards.clear()

    def _stale(self, blocks: Iterable[StreamedBlock], formats: BlockFormats) -> list[StreamedBlock]:
        lost = {*self._host.lost(), *(() if self._training is None else self._training.unencoded)}
        return [
            block
            for block in blocks
            if block.name in lost or self._written.get(block.name) != formats[block.name] or self._changed(block)
        ]

    def _prepare(self, stale: list[StreamedBlock]) -> None:
        """Prepare for writing bytes: read the parameters, and wait until no copy reads the old bytes."""
        self._refuse_racing(stale)
        if self._training is not None:
            self._training.finish()
        self._wait_for_readers()
        for block in stale:
            self._read(block)

    def _wait_for_readers(self) -> None:
        self._loader.mend()
        self._loader.wait_for_copies(self._loader.transfers())

    def _allocate(self, formats: BlockFormats, changed: Iterable[StreamedBlock]) -> None:
        options, layouts = self._options, lay_out_all(self._specs, formats)
        self._loader.is_allocated = False  # from here on the layouts are not those of `formats`
        self.formats = formats
        self._loader.allocate(layouts, self._slots, options.slot_bytes, self._vram_bytes, self._indices_of(changed))

    def _indices_of(self, blocks: Iterable[StreamedBlock]) -> set[int]:
        return {self._loader.names.index(block.name) for block in blocks}

    def _layout_of(self, block: StreamedBlock) -> BlockLayout:
        return self._loader.layouts[self._loader.names.index(block.name)]

    # ---- parameters that change --------------------------------------------------------------------------------------

    def _changed(self, block: StreamedBlock) -> list[str]:
        """Names of a block's parameters that have changed since they were last read."""
        if block.name in self._unread:
            return list(block.parameters)
        seen = self._seen[block.name]
        return [name for name, one in block.parameters.items() if look_at(one) != seen[name]]

    def unread(self, blocks: Iterable[str] | None = None) -> None:
        """Count every parameter of these blocks (None: of all) as changed."""
        self._unread.update(self._seen if blocks is None else blocks)

    def _read(self, block: StreamedBlock, *, into_masters: bool = True) -> None:
        """Read the parameters as the model has them now; names and refuses one that can no longer be streamed.

        into_masters: with train="weights", changed parameters are copied into their masters.
        """
        changed = self._changed(block)
        self._written.pop(block.name, None)
        for name in changed:
            one = block.parameters[name]
            self._check(f"{block.name}.{name}", block, one, parameter := current_parameter(f"{block.name}.{name}", one))
            one.parameter = parameter
            if into_masters and self._training is not None and self._trains(block, name):
                self._training.read_parameter(block.name, name, parameter)
        self._note(block)

    def _note(self, block: StreamedBlock) -> None:
        """Remember versions and addresses of a block's parameters, so that later changes are noticed."""
        self._seen[block.name] = _look_at_block(block)
        self._unread.discard(block.name)
        self._refuse_gradients(block)

    def _refuse_gradients(self, block: StreamedBlock) -> None:
        """Refuse gradients of trained Parameters themselves: only those of a block's own forward train its weights."""
        for name in () if self._training is None else self._training.trained_in(block.name):
            parameter, full_name = block.parameters[name].parameter, f"{block.name}.{name}"
            guarded, _, hook = self._guards.get(full_name, (None, None, None))
            if guarded is parameter or not parameter.requires_grad:
                continue
            if hook is not None:
                hook.remove()
            with torch.enable_grad():
                node: Any = parameter.expand_as(parameter).grad_fn
                node = node.next_functions[0][0]  # it adds to .grad, and lives as long as it is held
            self._guards[full_name] = parameter, node, node.register_prehook(functools.partial(_refuse_own, full_name))

    def _check(self, full_name: str, block: StreamedBlock, one: StreamedParameter, parameter: nn.Parameter) -> None:
        spec = self._specs[block.name][one.name]
        if parameter.device.type != "cpu":
            raise StreamError(
                f"{full_name} is on {parameter.device} now: streamed parameters live on the host; put it on the CPU, "
                "or close the stream first"
            )
        if (tuple(parameter.shape), parameter.dtype) != (spec.shape, spec.dtype):
            now, was = (f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (parameter, spec))
            raise StreamError(f"{full_name} is {now} now and was streamed as {was}; close the stream and stream again")
        self._refuse_thawed(full_name, block, one, parameter)

    def _refuse_thawed_weights(self, block: StreamedBlock) -> None:
        """Refuse a weight that requires gradients now and did not when the stream was opened, or has hooks."""
        trained = () if self._training is None else self._training.trained_in(block.name)
        for name, one in block.parameters.items():
            parameter = one.parameter
            if not parameter.requires_grad or (
                name in trained and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
            ):
                continue
            module, local = one.uses[0]
            if module._parameters.get(local) is parameter:  # else `read` refuses
                self._refuse_thawed(f"{block.name}.{name}", block, one, parameter)

    def _refuse_thawed(
        self, full_name: str, block: StreamedBlock, one: StreamedParameter, parameter: nn.Parameter
    ) -> None:
        if not parameter.requires_grad or self._options.train == "nothing":
            return
        if not self._trains(block, one.name):
            raise StreamError(
                f"{full_name} requires gradients now and is streamed as frozen, so it would never get one; call "
                "requires_grad_(False) on it, or close the stream and stream again"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise StreamError(
                f"{full_name} has hooks, and its gradient goes to the host past them, so they would never run; remove "
                "them, or keep this block out of the stream"
            )

    # ---- weights that are trained ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for updates, and make the model's Parameters the weights as they were trained."""
        if self._training is not None:
            self._refuse_racing(self._blocks)
            self._training.settle()

    def hook_state_dicts(self) -> list[RemovableHandle]:
        """Make state_dict hold the trained weights, and load_state_dict wait for updates; returns handles."""
        hooks = []
        for block in self._blocks:
            hooks.append(block.module.register_state_dict_pre_hook(functools.partial(self._before_saving, block)))
            hooks.append(block.module.register_state_dict_post_hook(functools.partial(self._after_saving, block)))
            hooks.append(block.module.register_load_state_dict_pre_hook(functools.partial(self._before_loading, block)))
        return hooks

    @alone
    def _before_saving(self, block: StreamedBlock, *_: Any) -> None:
        block.put_back()
        self.settle()

    @alone
    def _after_saving(
        self, block: StreamedBlock, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """Put the Parameters into the state, for a forward of another thread may have begun while they were read."""
        block.put_back()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if isinstance(saved := state.get(prefix + name), Tensor):
                state[prefix + name] = parameter if isinstance(saved, nn.Parameter) else parameter.detach()

    @alone
    def _before_loading(self, block: StreamedBlock, *_: Any) -> None:
        block.put_back()
        if self._training is not None:
            self._training.settle()

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
                self._read(self._by_name[block], into_masters=False)
        training.settle()
        raise StreamError(
            f"{listed(names)} changed after end_step and before synchronize(), while the update of the step was under "
            "way: which of the two is in it is not certain; call synchronize() before you change weights. Load the "
            "weights again, or go on with what the model holds now"
        )

    def _changed_masters(self, block: StreamedBlock) -> list[str]:
        changed = [] if self._training is None else self._changed(block)
        return [name for name in changed if self._trains(block, name)]


def formats_of(formats: Formats, blocks: Iterable[StreamedBlock], current: BlockFormats | None = None) -> BlockFormats:
    """Resolve `formats` for blocks; experts that cross by use do so in their own type, and any other is refused."""
    routed = {block.name: {name: one.spec for name, one in block.routed.items()} for block in blocks}
    chosen = resolve_formats(formats, {block.name: {**block.specs, **routed[block.name]} for block in blocks}, current)
    for block, specs in routed.items():
        for name, spec in specs.items():
            own_type, asked = own_format(spec, f"{block}.{name}").name, chosen[block].pop(name).name
            if asked != own_type:
                raise StreamError(
                    f"{block}.{name}: experts that cross by use do so in their own type, {own_type}, got {asked}; give "
                    f"formats={{'*.{name}': '{own_type}', ...}} with the others behind it, or stream with experts='all'"
                )
    return chosen


def lay_out_all(specs: BlockSpecs, formats: BlockFormats) -> list[BlockLayout]:
    """The layout of every block in these formats; formats that cannot hold a parameter are refused."""
    for block, names in formats.items():
        for name, fmt in names.items():
            check_whole_blocks(fmt, specs[block][name].shape, None, f"{block}.{name}")
    return [lay_out(specs[block], names) for block, names in formats.items()]

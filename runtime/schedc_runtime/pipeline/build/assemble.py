"""Builds what a pipeline consists of, in named steps over one value.

A step reads what earlier steps have set. Ranks wait for each other in `connect` and from `guard_failures` on; every
other step is this rank's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from schedc.cell import CellCosts
from schedc.ir.plan import Level
from schedc.step.program.tied import with_tied
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.cell_programs import asks_on_lane, cell_source, cells_on_rank, check_cells
from schedc_runtime.materialize.construction import construction_of
from schedc_runtime.partition import partition
from schedc_runtime.partition.shared import tied_apart, ties_of
from schedc_runtime.pipeline.agree.agreement import (
    check_fingerprints,
    difference,
    fingerprint,
    plan_prints,
    program_digest,
)
from schedc_runtime.pipeline.agree.guard import FailureGuard
from schedc_runtime.pipeline.agree.plan_fit import FirstBatch, check_model
from schedc_runtime.pipeline.agree.ragged import first_microbatch
from schedc_runtime.pipeline.agree.sequences import cut_sequences
from schedc_runtime.pipeline.build.apply_plan import (
    attach,
    check_contradictions,
    fused_blocks,
    mesh_for,
    offload_stages,
    provided_norms,
    recompute_stages,
)
from schedc_runtime.pipeline.build.assembly import Assembly, Settings
from schedc_runtime.pipeline.build.bound import BoundCode
from schedc_runtime.pipeline.build.chunked_loss import carried_loss, check_vocab, prints_of_columns
from schedc_runtime.pipeline.build.context import carry_segments, counted_alone, cuts_sequences
from schedc_runtime.pipeline.build.graph_limits import check_step_graphs
from schedc_runtime.pipeline.build.loss_function import LossHead
from schedc_runtime.pipeline.build.output_losses import as_loss, check_losses
from schedc_runtime.pipeline.build.parallelize import sharding_of, take_shards
from schedc_runtime.pipeline.build.random_steps import check_way, number_stages
from schedc_runtime.pipeline.build.replica_works import agree_on_bytes, bytes_of_stages, place_works, together
from schedc_runtime.pipeline.build.split_products import split_products
from schedc_runtime.pipeline.build.stages import (
    copied_stages,
    device_of,
    device_of_backend,
    layout_of_stages,
    stages_of_places,
)
from schedc_runtime.pipeline.build.tied import TiedWeights, check_copies, check_tied_lines
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.ranks.network import Network
from schedc_runtime.segments.captured import CapturedSegments
from schedc_runtime.stage.stage import Stage


def assemble(settings: Settings) -> Assembly:
    """A collective of all ranks of the mesh. Raises `RuntimeFault`, `DiagnosticError` and `PartitionError`."""
    assembly = Assembly(settings)
    for step in STEPS:
        step(assembly)
    return assembly


def find_device(assembly: Assembly) -> None:
    """The device is the model's; that of a model on the meta device follows from its construction."""
    settings = assembly.settings
    assembly.program = settings.program
    assembly.construction = construction = construction_of(settings.model)
    if construction.deferred:
        assembly.device = settings.device or construction.device or device_of_backend(settings.group)
    else:
        assembly.device = device_of(settings.model)


def choose_mesh(assembly: Assembly) -> None:
    """The plan and the mesh, both by default those of the program."""
    settings, program = assembly.settings, assembly.program
    assembly.plan = settings.plan or program.plan
    assembly.mesh = mesh_for(assembly.plan, program, settings.mesh)
    if assembly.mesh.pipeline != program.ranks:
        raise RuntimeFault(
            f"the program is for {program.ranks} ranks, the mesh has {assembly.mesh.pipeline} in a pipeline",
            f"compile the schedule with P={assembly.mesh.pipeline}, or take a mesh with {program.ranks} pipeline ranks",
        )


def connect(assembly: Assembly) -> None:
    """The network. It comes before all that can fail on one rank alone, since other ranks wait for it."""
    settings = assembly.settings
    assembly.network = Network(assembly.mesh, settings.group, settings.in_process, settings.timeout, assembly.device)


def check_attachments(assembly: Assembly) -> None:
    """A plan made in Python goes through the checks of a plan's lines. The model has the plan's sizes."""
    check_contradictions(assembly.plan, assembly.program, assembly.mesh)
    check_model(assembly.settings.model, assembly.plan)
    check_way(assembly.settings.rng, assembly.settings.seed)
    assembly.compile = None
    if (asked := assembly.settings.compile) not in (None, False):
        from schedc_runtime.compiled.settings import compile_settings

        assembly.compile = compile_settings(asked)


def cut_model(assembly: Assembly) -> None:
    """The stages' modules, the names that the whole model's state has, and the tokens of the recording."""
    settings, program, cut = assembly.settings, assembly.program, assembly.settings.cut
    model, library = settings.model, settings.providers["loss"]
    layout = cut.layers or layout_of_stages(program)
    given = as_loss(settings.loss_fn)
    cuts = cuts_sequences(model, program)
    if cuts or assembly.mesh.context > 1:
        given = counted_alone(given, "segments" if cuts else "context ranks")
    planned = carried_loss(given, assembly.plan.loss, model, assembly.device, library, assembly.split)
    assembly.head = LossHead(planned, layout.losses if layout else 1)
    check_losses(planned, assembly.head.losses, assembly.plan.row_slices)
    check_vocab(model, assembly.head.loss_fn, assembly.plan.loss)
    assembly.partition = partition(
        model,
        program.stages,
        costs=cut.costs,
        split_points=cut.split_points,
        layout=layout,
        blocks=cut.blocks,
        inputs=cut.inputs,
        placement=program.placement,
        example=first_microbatch(
            cut_sequences(settings.example, 1, program.segments, settings.dims) if cuts else settings.example,
            program.microbatches,
            settings.dims,
        ),
        head=assembly.head.left_out,
        insert=None if assembly.split is None else assembly.split.insertion,
    )
    assembly.first_batch = FirstBatch(model, assembly.plan)
    split = assembly.split
    assembly.names = {
        name: (value.shape if split is None else split.whole_shape(name, value.shape), value.dtype)
        for name, value in model.state_dict().items()
    }


def tie_weights(assembly: Assembly) -> None:
    """The parameters that several stages use; the program sums the gradients of those on different ranks."""
    parts = assembly.partition
    assembly.tied = tied_apart(parts.shared, assembly.program.placement)
    ties = ties_of(parts.shared, parts.modules)
    check_tied_lines(assembly.program, ties)
    assembly.program = with_tied(assembly.program, ties)


def make_stages(assembly: Assembly) -> None:
    """The stages of the places here: experts and dense parts spread, recomputation set, chains fused."""
    settings, program, network = assembly.settings, assembly.program, assembly.network
    if assembly.mesh.shard_dense:
        assembly.shards = sharding_of(assembly)

    def spread(place: Coordinate, modules: Iterable[nn.Module]) -> None:
        modules, near = list(modules), network.peer_groups[place]
        costs = settings.cells if isinstance(settings.cells, CellCosts) else None
        on_lane = asks_on_lane(assembly.plan, settings.cells, assembly.device)
        given = costs, settings.kernels, settings.providers
        attach(modules, assembly.plan, near.experts, assembly.mesh, near.replicas, *given, host_lane=on_lane)
        if not assembly.construction.deferred:
            take_shards(assembly, place, modules)

    if assembly.split is not None:
        assembly.split.slice_tokens(assembly.partition.modules, assembly.plan.token_slices)
    assembly.stages = stages_of_places(
        assembly.partition,
        program,
        assembly.places,
        assembly.head,
        attach=spread,
        segmented=settings.cut.segmented,
        slices=assembly.plan.row_slices,
    )
    assembly.weights = TiedWeights(assembly.tied, assembly.stages, assembly.mesh)
    recompute_stages(assembly.stages.values(), assembly.plan, program)
    assembly.fused = fused_blocks(assembly.plan.fuse, assembly.compile, assembly.held(), assembly.partition.aliases)
    assembly.norms = provided_norms(
        settings.providers["norm"], settings.model, assembly.held(), assembly.device, assembly.plan.fuse,
        compiled=assembly.compile is not None,
    )  # fmt: skip
    if settings.rng == "by name":
        number_stages(assembly.partition, assembly.held(), assembly.device)
    assembly.copied = [stage for place in assembly.places for stage in _copied(assembly, place)]


def _copied(assembly: Assembly, place: Coordinate) -> list[Stage]:
    """The stages of a place that another rank holds, too: as their second copy, or in another replica."""
    held = assembly.stages[place]
    if assembly.mesh.peers > 1:
        return list(held.values())
    return [held[index] for index in copied_stages(assembly.program, place.pipeline)]


def compile_units(assembly: Assembly) -> None:
    """Let torch.compile compile the units of the stages here, if the settings say so; each at its first call."""
    if assembly.compile is None:
        return
    if any(stage.recomputation.level is not Level.NONE for stage in assembly.held()):
        raise RuntimeFault(
            "compile= and a level of recomputation exclude each other: a compiled unit itself decides what its backward"
            " recomputes",
            "leave `recompute` out of the plan, or compile= out of the pipeline; R of a whole stage, and"
            " torch.utils.checkpoint inside units, work with both",
        )
    units: dict[str, list[nn.Module]] = {}
    for stage in assembly.held():
        blocks = assembly.partition.blocks[stage.index]
        split = () if assembly.split is None else assembly.split.units(stage.module)
        for name in blocks if assembly.split is None else split:
            units.setdefault(name, []).append(stage.module.get_submodule(name))
    from schedc_runtime.compiled.units import CompiledUnits

    opened = () if assembly.split is None else assembly.split.opened
    assembly.compiled = CompiledUnits(assembly.compile, units, opened=opened)


def capture_segments(assembly: Assembly) -> None:
    """Let segments replay their launches, if the cut says so; each is captured at its first call."""
    graphs, mesh = assembly.settings.cut.graphs, assembly.mesh
    if graphs == "step":
        check_step_graphs(assembly)
    if graphs in (False, "step"):
        return
    if graphs is not True:
        raise RuntimeFault(f"graphs={graphs!r} is no kind of graph", 'write graphs=True for segments, or graphs="step"')
    if max(mesh.pipeline, mesh.experts, mesh.tensor) > 1:
        split = f", {mesh.tensor} tensor" if mesh.tensor > 1 else ""
        raise RuntimeFault(
            f"graphs=True on {mesh.pipeline} pipeline{split} and {mesh.experts} expert ranks: segments are captured"
            " inside of a step, and a GPU captures nothing while messages of other ranks come in",
            "leave graphs=True out, or take a pipeline of one rank without shared experts",
        )
    others = {"compile=": assembly.compile is not None, "shard_dense": mesh.shard_dense}
    if taken := [name for name, chosen in others.items() if chosen]:
        raise RuntimeFault(f"graphs=True and {taken[0]} exclude each other", "leave one of the two out")
    for stage in assembly.held():
        if not stage.is_cut:
            raise RuntimeFault(
                f"graphs=True, and stage {stage.index} runs whole: only segments are captured",
                "write cut=Cut(segmented=True, graphs=True)",
            )
        stage.captures = CapturedSegments()


def open_lanes(assembly: Assembly) -> None:
    """The lanes of every place here whose program moves activations to the host."""
    lanes = [
        offload_stages(
            assembly.program, place.pipeline, held, assembly.device, assembly.plan, assembly.mesh.name(place)
        )
        for place, held in assembly.stages.items()
    ]
    assembly.lanes = [of_place for of_place in lanes if of_place is not None]


def order_cells(assembly: Assembly) -> None:
    """The order inside each instruction on segmented stages, checked."""
    cells, program, network = assembly.settings.cells, assembly.program, assembly.network
    source = cell_source(assembly.plan, cells) if cells is None or isinstance(cells, CellCosts) else cells
    assembly.cell_source, assembly.cells = source, {}
    for place in assembly.places:
        if place.replica == assembly.places[0].replica:
            listed = cells_on_rank(program, place.pipeline, assembly.stages[place], source)
            check_cells(program, place.pipeline, listed, network.peer_groups[place].inside_layers)
            assembly.cells |= listed


def prepare_code(assembly: Assembly) -> None:
    """Where the code of each kind of batch is bound, once its shapes are known."""
    assembly.bound_code = BoundCode(
        assembly.partition, assembly.stages, assembly.mesh, assembly.device, assembly.cell_source, assembly.shards,
        assembly.tied, assembly.plan.row_slices,
        marked=not (assembly.network.in_process or device_for(assembly.device).supports("streams")),
    )  # fmt: skip


def guard_failures(assembly: Assembly) -> None:
    """From here on a failure on one rank is raised on all of them."""
    code, stages = assembly.bound_code, tuple(assembly.held())

    def forget() -> None:
        code.forget()
        for stage in stages:
            stage.reset()

    assembly.guard = FailureGuard(assembly.network, assembly.settings.timeout, forget, code.take_groups)


def release_modules(assembly: Assembly) -> None:
    """Free the stages of other ranks, if the cut says so."""
    if assembly.settings.cut.release_others:
        assembly.partition.release_others({stage.index for stage in assembly.held()})


def compare_ranks(assembly: Assembly) -> None:
    """All ranks must run the same program on the same model: a difference would be a deadlock later.

    Weights on the meta device are compared by `materialize`, and copies of tied weights by the first step.
    """
    control = assembly.guard.control
    control.meet()
    prints = {
        "mesh": repr(assembly.mesh),
        "use of the meta device": repr(assembly.construction.deferred),
        "tied weights": repr([shared.uses for shared in assembly.tied]),
        "`rng` and `seed`": f"{assembly.settings.rng}, {assembly.settings.seed}",
        "`providers`": repr(assembly.settings.providers.names),
        "`others`": repr([program_digest(each) for each in assembly.settings.others]),
        "plan of styles": "" if assembly.split is None else repr(assembly.split.styles),
        **prints_of_columns(assembly.head.loss_fn),
        "`compile`": "" if assembly.compile is None else f"{assembly.compile}",
        **plan_prints(assembly.plan, assembly.held()),
        **fingerprint(assembly.program, assembly.names, assembly.partition.blocks, assembly.copied, assembly.cells),
    }

    def compared(everyone: list[Any]) -> tuple[str, Any]:
        return difference([theirs for theirs, _ in everyone], control.names), together(sizes for _, sizes in everyone)

    different, all_bytes = control.fold("building the pipeline", [prints, bytes_of_stages(assembly)], compared)
    check_fingerprints(different)
    agree_on_bytes(assembly, all_bytes)
    if assembly.tied and not assembly.construction.deferred:
        everyone = control.gather("comparing tied weights", assembly.weights.facts(training=False))
        check_copies([copy for part in everyone for copy in part])


def join_communicators(assembly: Assembly) -> None:
    """The groups of the program's communicators, which all ranks now know to be the same."""
    with assembly.guard("joining communicators"):
        assembly.network.join_communicators(assembly.program, assembly.settings.timeout)


def shard_parameters(assembly: Assembly) -> None:
    """Last, since until now every step may read whole parameters."""
    if assembly.shards is not None and not assembly.construction.deferred:
        assembly.shards.shard()
    assembly.guard.ready()
    if not any(True for stage in assembly.held() for _ in stage.module.parameters()):
        warnings.warn(
            f"{assembly.network.names[assembly.network.process]} holds no parameters (its stages are"
            f" {[stage.index for stage in assembly.held()]}): torch's optimizers refuse an empty list of parameters."
            " Make no optimizer on this rank, or cut the model elsewhere (cut=Cut(...)).",
            stacklevel=4,
        )


def accept_model(assembly: Assembly) -> None:
    """What the steps before have changed in the model is no change of the user's."""
    assembly.partition.records.accept()


STEPS: tuple[Callable[[Assembly], None], ...] = (
    find_device,
    choose_mesh,
    connect,
    check_attachments,
    split_products,
    carry_segments,
    cut_model,
    tie_weights,
    make_stages,
    compile_units,
    capture_segments,
    open_lanes,
    order_cells,
    prepare_code,
    guard_failures,
    release_modules,
    compare_ranks,
    join_communicators,
    place_works,
    shard_parameters,
    accept_model,
)
"""What `assemble` does, in order."""

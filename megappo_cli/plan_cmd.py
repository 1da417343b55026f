"""`megappo plan`: what a configuration will cost on a cluster. Starts no process and imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def plan(
    cfg: Annotated[Path, typer.Argument(metavar="CFG", help="YAML file of the experiment.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as actor.parallel.recompute=full."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Card: h100-80g, h200-141g, a100-80g, a100-40g.")] = "h100-80g",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs in each node.")] = 8,
    model: Annotated[
        str | None, typer.Option(help="Published model instead of every model folder, such as llama3-70b.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank layouts that fit by estimated time.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts to list with --search.")] = 10,
    fill: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Mean prompt and response, as a share of their longest.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Say beforehand whether a run fits, what it sends and how long it takes; exit code 4 if it does not fit."""
    from megappo.config.load import read_config
    from megappo.planning import show
    from megappo.planning.cost import Machine
    from megappo.planning.hardware import Assumptions, card
    from megappo.planning.plan import layout_problems, make_plan, smallest_change
    from megappo.planning.plan import search as search_layouts
    from megappo.planning.shape import published_shape, read_shape

    config, sources = read_config(cfg, overrides or [])
    machine = Machine(card(gpu), nodes, gpus_per_node, Assumptions(fill=fill))
    shapes = read_shape
    if model is not None:
        shape = published_shape(model)
        shapes = lambda path: shape  # noqa: E731
    sources.raise_if_any(layout_problems(config, machine.world, shapes))
    planned = make_plan(config, machine, shapes)
    remedy = None if planned.fits else smallest_change(config, machine, shapes)
    found = search_layouts(config, machine, shapes, most=top) if search else None
    if as_json:
        typer.echo(json.dumps(show.plan_data(planned, remedy, found), indent=2))
    else:
        lines = [*show.plan_lines(planned), "", *show.verdict_lines(planned, remedy)]
        lines += ["", *show.search_lines(found)] if found is not None else []
        typer.echo("\n".join([*lines, "", *show.assumption_lines(planned)]))
    return 0 if planned.fits else 4

"""``mua replay`` for people."""

from __future__ import annotations

from rich.table import Table

from mua.observe.safe_output import SafeConsole
from mua.types import Json


def show_replay(found: Json) -> None:
    """Print what :func:`mua.trainer.replay.replay` found."""
    changed = found.get("changed")
    table = Table("", "stored", "replayed", *(["changed"] if changed else []))
    for name in found["replayed"]:
        columns = [found["stored"].get(name), found["replayed"][name]]
        columns += [changed["metrics"].get(name)] if changed else []
        table.add_row(name, *("" if value is None else f"{value:.9g}" for value in columns))
    SafeConsole().print(table)
    same = {True: "the stored ones, bit for bit", False: "OTHERS than the stored ones", None: "not stored: no digest"}
    print(f"step {found['step']}, {found['groups']} groups, from the checkpoint of step {found['from']}")
    print(f"gradients: {same[found['same_gradients']]}")
    print(f"weights, advantages and log-probabilities: {same[found['same_batch']]}")
    if found["drifted_steps"]:
        print(f"on the way, steps {found['drifted_steps']} had other gradients than the stored ones")
    if changed:
        print(f"with {' '.join(changed['overrides'])}:")
        for name in ("advantages", "weights"):
            of = changed[name]
            print(f"  {name}: {of['tokens_changed']} tokens changed, by {of['largest_change']:.6g} at most")
        print(f"  cosine of gradients, update by update: {', '.join(f'{c:.9f}' for c in changed['cosines']) or 'none'}")

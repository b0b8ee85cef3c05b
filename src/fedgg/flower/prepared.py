"""Everything a federation on one machine needs on disk before its processes start."""

from __future__ import annotations

import shutil
from pathlib import Path

import tomli_w

from fedgg.errors import UserError
from fedgg.files import MEGABYTE, read_bytes, read_toml, refuse_links, write_atomically, write_text
from fedgg.flower.app_folder import write_app
from fedgg.flower.certificates import make_certificates
from fedgg.flower.division import divide
from fedgg.flower.places import Places
from fedgg.flower.ports import Listening
from fedgg.lab.config import Experiment
from fedgg.lab.files import writing_to
from fedgg.lab.store import Store


def prepare(
    places: Places, experiment: Experiment, listening: Listening, settings: dict[str, int | float], data: Path | None
) -> None:
    """Data in the hands of their owners, the app, its settings; certificates anew each time."""
    clients = experiment.split.clients
    places.refuse_links()
    with writing_to(places.out):
        refuse_links(places.folder)  # Flower's processes write below it, too
        if Store(places.out).holds_a_run():
            settings = _said_before(places) | settings
        else:
            shutil.rmtree(places.nodes, ignore_errors=True)  # data and memories of a run that never began
            places.server_data.unlink(missing_ok=True)
        places.make(clients)
        places.forget_the_last_time()
        if not places.complete(clients):
            _hand_out(places, experiment, data)
        if listening.tls:
            make_certificates(places.certificates.key.parent, listening.names)
        write_app(places.app, experiment, {})
        whole = {"out": str(places.out), "data": str(places.server_data), **settings}
        write_text(places.run_settings, tomli_w.dumps(whole))
        for client in range(clients):
            place = places.node(client)
            place.memory.mkdir(mode=0o700, exist_ok=True)
            if listening.tls:
                write_atomically(place.authority, read_bytes(places.certificates.authority, MEGABYTE))
            own = {"client-id": client, "data": str(place.data), "memory": str(place.memory)}
            write_text(place.settings, tomli_w.dumps(own))


def _said_before(places: Places) -> dict[str, int | float]:
    """The settings of the run that is taken up again; those given now come before them."""
    try:
        before = read_toml(places.run_settings)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in before.items() if isinstance(value, int | float)}


def _hand_out(places: Places, experiment: Experiment, data_folder: Path | None) -> None:
    """Divide beside the places, then move each file to its owner."""
    dividing = places.folder / "dividing"
    dividing.mkdir(mode=0o700)
    divide(experiment, dividing, data_folder)
    owners = {f"client-{client}": places.node(client).data for client in range(experiment.split.clients)}
    for name, place in {"server": places.server_data, **owners}.items():
        file = dividing / f"{name}.npz"
        if not file.is_file():
            raise UserError(f"{name} got no data: {file} was not written")
        file.chmod(0o600)
        file.replace(place)
    shutil.rmtree(dividing)

"""One run of a comparison: choose, train, test. A run is a folder; table.py makes the table from their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp.compare.methods import Own, choose, find_method, title
from dmcp.compare.problem import Choice, Prepared, Problem, samples_of
from dmcp.compare.protocol import RESULT, SAME, PlannedRun, Subject, config_of, problem_of
from dmcp.cutting import cut
from dmcp.data.datasets import split
from dmcp.data.loaders import make_loader
from dmcp.errors import TrainingError
from dmcp.exporting.export import blaming
from dmcp.results import last_epoch_loss, measure_networks
from dmcp.retraining import Retraining, catch_up, train_all
from dmcp.runs.files import PREPARED, read_json
from dmcp.runs.records import UNPRUNED, Row
from dmcp.runs.storage import load, save
from dmcp.runs.writing import Run
from dmcp.runtime.batches import Loader, device_of
from dmcp.runtime.checkpoint import DONE, State
from dmcp.runtime.distributed import current
from dmcp.runtime.io import parse_tensors, read_bytes
from dmcp.settings import Retrain
from dmcp.tracing.modules import narrow
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, train

_SPENT = "spent.json"  # seconds of the choice so far
_CHOICE = "choice"  # stage of the checkpoint of what was chosen
_MAX_BYTES = 2**34  # of a prepared network


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run."""

    run: PlannedRun
    networks: tuple[Row, ...]  # named after their training: SAME, or the way of the method's authors
    widths: Mapping[str, int]  # of all of them
    full_macs: int  # of the unpruned network
    seconds: float  # until the widths were known, or the network that others start from
    sample_passes: int  # in that time
    device: str


class OneRun:
    """One run at work, in a folder with its checkpoints and log."""

    def __init__(self, planned: PlannedRun, subject: Subject, files: Run, runtime: Runtime) -> None:
        self.planned = planned
        self.subject = subject
        self.files = files
        self.runtime = runtime
        self.device = device_of(subject.model)
        self.train_losses: dict[str, float | None] = {}  # of the networks that were trained, by name

    def do(self) -> None:
        """Prepare or choose, train, test, and write the result."""
        planned = self.planned
        full = self.subject.graph.full
        if planned.budget:
            choice = self._choose()
            networks = self._test(self._train_chosen(choice), choice.widths)
            self._write_result(networks, choice.widths, choice.sample_passes)
        elif planned.method == UNPRUNED:
            with self._clock():
                nets = self._train(UNPRUNED, full)
            networks = self._test(nets, full)
            self._write_result(networks, full, planned.recipe.epochs * samples_of(self.subject.loader))
        else:
            prepared = self._prepare()
            self._write_result((), full, prepared.sample_passes)
        self.files.close()

    def _write_result(self, networks: Sequence[Row], widths: Widths, sample_passes: int) -> None:
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.device)
        result = Result(
            run=self.planned,
            networks=tuple(networks),
            widths=dict(widths),
            full_macs=self.subject.graph.macs(),
            seconds=read_json(self.files.folder / _SPENT)["seconds"],
            sample_passes=sample_passes,
            device=device,
        )
        self.files.write(RESULT, asdict(result))

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        """Count the seconds of the work inside; those of earlier starts are added."""
        path = self.files.folder / _SPENT
        before = 0.0
        if path.exists():
            before = float(read_json(path)["seconds"])
        start = time.perf_counter()
        try:
            yield
        finally:
            self.files.write(_SPENT, {"seconds": before + time.perf_counter() - start})

    # the choice

    def _problem(self) -> Problem:
        """What the method gets. The held-out images are the same for all seeds."""
        planned = self.planned
        config = planned.protocol.config
        images, held_out_images = split(self.subject.images, config.holdout)
        learns = bool(planned.settings.get("hold_out"))  # by the held-out images: then they are shuffled and augmented
        held_out_batch = min(config.batch, len(held_out_images))
        loader: Loader | None = None  # all training images
        if learns or find_method(planned.method).holds_out:
            loader = make_loader(images, config.batch, True, planned.seed, self.device)
        return problem_of(
            planned.protocol,
            self.subject,
            planned.budget,
            recipe=planned.recipe,
            loader=loader,
            held_out=make_loader(held_out_images, held_out_batch, learns, planned.seed, self.device),
            seed=planned.seed,
            runtime=self.runtime,
        )

    def _prepare(self) -> Prepared:
        """Train what the runs of a method start from, and write its weights."""
        planned = self.planned
        prepare = find_method(planned.method).prepare
        assert prepare is not None
        with self._clock(), blaming(f"{planned.method} failed", TrainingError):
            prepared = prepare(self._problem(), config_of(planned.method, planned.settings))
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in prepared.state.items()}
        self.files.write(PREPARED, safetensors.torch.save(state))
        return prepared

    def _choose(self) -> Choice:
        """What the method chooses; an interrupted run does not choose again."""
        checkpointer = self.runtime.stage(_CHOICE).checkpointer
        assert checkpointer is not None
        checkpoint = checkpointer.load(current())
        if checkpoint is not None:
            return self._restore_choice(checkpoint.facts, checkpoint.tensors)

        planned = self.planned
        start = self._start_weights()
        with self._clock():
            choice = choose(planned.method, self._problem(), config_of(planned.method, planned.settings), start)

        kept: dict[str, Any] = {}
        for name, channels in choice.kept.items():
            if isinstance(channels, int):
                kept[name] = channels
            else:
                kept[name] = torch.as_tensor(channels).tolist()
        facts = {
            "widths": choice.widths.to_json(),
            "kept": kept,
            "has_model": choice.model is not None,
            "sample_passes": choice.sample_passes,
            DONE: True,
        }
        checkpointer.save(1, self._weights(choice.model), facts, current())
        return choice

    def _restore_choice(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Choice:
        """The choice of a checkpoint."""
        subject = self.subject
        model = None
        if facts["has_model"]:
            model = narrow(subject.model, {}, {})
        self._weights(model).restore(tensors, [], current())
        widths = subject.graph.widths(Widths.from_json(facts["widths"]))
        return Choice(widths=widths, kept=facts["kept"], model=model, sample_passes=facts["sample_passes"])

    def _start_weights(self) -> Mapping[str, Tensor] | None:
        """The weights that the method starts from, made by another run; None if it needs none."""
        planned = self.planned
        if not planned.uses:
            return None
        folder = self.files.folder.parent / planned.uses
        if find_method(planned.method).trained:
            return load(folder, self.subject.model).state_dict()
        return parse_tensors(read_bytes(folder / PREPARED, _MAX_BYTES), folder / PREPARED)

    def _weights(self, model: nn.Module | None) -> State:
        """The state of a checkpoint that has no more than a network."""
        weights = {}
        if model:
            weights = model.state_dict()
        return State(weights, dict, [], [], [], self.device)

    # the networks

    def _train(self, name: str, widths: Widths, kind: Retrain = Retrain.SCRATCH) -> dict[str, nn.Module]:
        """Train a network with these widths, which starts with fresh weights."""
        subject = self.subject
        retraining = Retraining(config=self.planned.recipe, kind=kind)
        trained = train_all(
            subject.model, subject.graph, {name: widths}, subject.loader, retraining, runtime=self.runtime
        )
        self.train_losses |= trained.losses
        return trained.networks

    def _train_chosen(self, choice: Choice) -> dict[str, nn.Module]:
        """The chosen network, trained from scratch and in the way of the method's authors, as far as both are asked."""
        planned = self.planned
        subject = self.subject
        training = planned.own_training
        nets: dict[str, nn.Module] = {}
        name = title(planned.method)
        if planned.scratch:
            nets |= self._train(name, choice.widths)

        name += ", own"
        if training is Own.SLIMMABLE:
            nets |= self._train(name, choice.widths, Retrain.SLIMMABLE)
        elif training is not None:
            assert choice.model is not None
            nets[name] = cut(choice.model, subject.graph, choice.kept)
        if training is Own.FINETUNED:
            steps = train(nets[name], subject.loader, planned.tuning, runtime=self.runtime.stage(name))
            self.train_losses[name] = last_epoch_loss(steps)
            catch_up(nets[name], subject.loader, planned.tuning)
        return nets

    def _test(self, nets: dict[str, nn.Module], widths: Widths) -> tuple[Row, ...]:
        """Test the networks, and save the first one. Rows are named after the training."""
        subject = self.subject
        example = next(iter(subject.test))[0]
        rows = measure_networks(
            nets,
            subject.graph,
            dict.fromkeys(nets, widths),
            subject.test,
            example,
            train_losses=self.train_losses,
            runtime=self.runtime,
        )
        save(next(iter(nets.values())), widths, self.files.folder)
        named = []
        for row in rows:
            from_scratch = row.name == title(self.planned.method)
            named.append(replace(row, name=SAME if from_scratch else str(self.planned.own_training)))
        return tuple(named)

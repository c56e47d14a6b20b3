"""Options that several commands share, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmcp.engine import Precision
from dmcp.pruning import Retrain

Model = Annotated[str, typer.Option(help="resnet18, timm:NAME, cifar:NAME, digits:resnet, package.module:factory.")]
ModelArgs = Annotated[list[str] | None, typer.Option(help="Argument of its builder, like width_mult=1.5; repeatable.")]
Frozen = Annotated[list[str] | None, typer.Option(help="Module or space whose channels stay whole; repeatable.")]
Data = Annotated[str, typer.Option(help="digits, cifar10, cifar100, a folder of shards, or one with train/ and val/.")]
Budget = Annotated[str, typer.Option(help="50%, 211M, 1.1G, params:2M, or several: 50%,params:2M.")]
Out = Annotated[str, typer.Option(help="Folder of the run; default: a new one in runs/.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data in retraining; default: the paper's 100.")]
SearchEpochs = Annotated[int, typer.Option(help="Passes over the data in the search.")]
Warmup = Annotated[float | None, typer.Option(help="Share of them for weights only; default 0.5, or 0 with --weights.")]
Batch = Annotated[int, typer.Option(help="Images in a batch, over all processes; learning rates are scaled with it.")]
Lr = Annotated[float | None, typer.Option(help="Highest learning rate of retraining at a batch of 2048; default 0.8.")]
SearchLr = Annotated[float, typer.Option(help="First learning rate of the search at a batch of 1024.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay of search and retraining.")]
Groups = Annotated[int, typer.Option(help="Groups that each space is divided into.")]
Align = Annotated[int, typer.Option(help="Widths are multiples of this.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
RetrainKind = Annotated[Retrain, typer.Option(help="How the pruned network gets its weights.")]
Controls = Annotated[bool, typer.Option("--controls", help="Also train the unpruned network and uniform widths.")]
Weights = Annotated[str, typer.Option(help="File to start from: .safetensors, or .pth with weights only.")]
Input = Annotated[str, typer.Option(help="Shape of one sample, like 3x224x224; default: the data's or the model's.")]
Holdout = Annotated[float, typer.Option(help="Share of the training images that only the alphas see.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Numbers = Annotated[Precision | None, typer.Option(help="Of the forward passes; default: bfloat16 on a GPU.")]
Compile = Annotated[bool | None, typer.Option(help="Compile the networks; default: on a GPU, if it pays.")]
Graphs = Annotated[bool | None, typer.Option(help="Replay steps as CUDA graphs; default: on one GPU.")]
ChannelsLast = Annotated[bool | None, typer.Option(help="Store images pixel by pixel; default: on a GPU.")]
Tf32 = Annotated[bool, typer.Option(help="Let a GPU round the factors of float32 products.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="The same bits in every run, also on a GPU.")]
SyncBatchnorm = Annotated[
    bool, typer.Option("--sync-batchnorm", help="On several GPUs: BatchNorm statistics of all of them together.")
]
TrainBatch = Annotated[int, typer.Option(help="Images in a batch of the retraining; default: as in the search.")]
Resume = Annotated[str, typer.Option(metavar="RUN", help="Go on with a run that was interrupted, as it was begun.")]
RecipeName = Annotated[str, typer.Option("--recipe", help="Settings by name, like imagenet_mobilenet_v2_211m.")]
Seeds = Annotated[int, typer.Option(help="So many runs side by side, with seeds from --seed on, and their mean.")]
SaveSteps = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")]
SaveMinutes = Annotated[float, typer.Option(min=0, help="Minutes between two checkpoints, if that is sooner.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Train nothing: spaces, reachable range, time and memory.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]

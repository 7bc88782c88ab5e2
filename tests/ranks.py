"""Runs a function of a test module in several real processes: gloo, DeepSpeed's own start, one thread each.

    def law(folder): ... return {"rank": distributed.get_rank()}      # at the top of the test module
    def test_it(tmp_path): first, second = together(law, folder=str(tmp_path))

What goes in and comes out is JSON. A rank that fails takes the others with it, and its traceback is the error's text;
so does a law that takes too long, with the place where every rank stood.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forklora.recipes.launch import sweep

GRACE = 3.0  # seconds that the other ranks have for errors of their own, once one has failed


def together(law, *, ranks=2, timeout=120, **arguments):
    """What ``law(**arguments)`` returns on each rank, in the order of the ranks.

    Raises:
        RuntimeError: a rank failed, with the traceback of each that did.
        TimeoutError: not all of them were done in ``timeout`` seconds, with the place where each stood.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = [law.__module__, law.__name__, json.dumps(arguments), folder, str(timeout)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        running = [_start(rank, ranks, port=port, task=task) for rank in range(ranks)]
        try:
            _wait(running, timeout + GRACE)
        finally:
            _end(running)
            sweep([f"--master_port={port}"])
        said = [Path(folder, f"{rank}.err").read_text()[-4000:] for rank in range(ranks)]
        failed = [f"rank {rank}:\n{said[rank]}" for rank, process in enumerate(running) if process.returncode != 0]
        if failed:
            late = any("Timeout (" in text for text in failed)
            raise (TimeoutError if late else RuntimeError)("\n".join(failed))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _start(rank, ranks, *, port, task):
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    with Path(task[3], f"{rank}.err").open("w") as said:
        command = [sys.executable, str(Path(__file__)), *task]
        # a group of its own, so that whatever it starts can be ended with it
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def _end(running):
    """Kill whatever runs still."""
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(running, timeout):
    """Until all are done, or the time is over; it is over soon once one has failed."""
    end, failed = time.monotonic() + timeout, False
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        if not failed and any(process.poll() for process in running):
            end, failed = min(end, time.monotonic() + GRACE), True
        time.sleep(0.05)


def engine(model, stage, *, optimizer=None, **settings):
    """A DeepSpeed engine on a model with a client optimizer; plain SGD over what is trained, unless one is given.

    ZeRO-3 keeps every parameter in pieces, however small: where it works for all, it works for large ones.
    """
    import deepspeed
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1) if optimizer is None else optimizer(trained)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(stage, **settings))[0]


def configuration(stage, **settings):
    """A DeepSpeed configuration for one row a rank and a client optimizer."""
    pieces = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage} | pieces,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    } | settings


def _main(module, name, arguments, folder, timeout):
    import faulthandler
    import importlib

    faulthandler.dump_traceback_later(float(timeout), exit=True)
    import deepspeed
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    rank = distributed.get_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()  # who leaves early closes the connections of the others
    os._exit(0)  # taking down the threads of many engines can end in std::terminate, after all is done


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)
    _main(*sys.argv[1:])

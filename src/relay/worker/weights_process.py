"""One copy of the weights for all engines of a GPU: ``python -m relay.worker.weights_process --spec FILE_OR_JSON
[--launcher PID]``.

Loads the weights of the spec's pack onto its device, hands them out over ``weights_socket``, computes nothing. It ends when nobody
has used them for a while, or with ``--launcher``; if it ends before, its engines end too and are started again.
"""

import argparse
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

from relay.errors import DeviceLostError, RelayError, StartupError
from relay.extras import require_gpu
from relay.worker.host import die_with_parent
from relay.worker.load_report import report_for
from relay.worker.served_pack import open_pack
from relay.worker.spec import WorkerSpec, decode_spec
from relay.worker.weights_link import listen, same_user, send_message

FIRST_USER_S = 300.0
UNUSED_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay-weights")
    parser.add_argument("--spec", required=True, help="WorkerSpec as JSON, or the path of a file holding it")
    parser.add_argument("--launcher", type=int, default=0, help="end with this parent process")
    device = "the GPU"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's business
    try:
        arguments = parser.parse_args()
        if arguments.launcher and not die_with_parent(arguments.launcher):
            raise StartupError("the launcher ended before the holder of its weights started")
        spec = decode_spec(arguments.spec)
        device = spec.device
        serve(listen(spec.weights_socket), lambda: _load(spec))
        status, reason = 0, ""
    except RelayError as error:
        status, reason = error.exit_code, str(error)
    except OSError as error:
        status, reason = 1, f"cannot listen: {error}"
    except RuntimeError as error:  # torch's for whatever CUDA says; there is nothing else in this process to raise one
        status, reason = DeviceLostError.exit_code, cuda_failure(device, error)
    if status:
        print(reason, file=sys.stderr, flush=True)
    os._exit(status)


def cuda_failure(device: str, error: RuntimeError) -> str:
    """One line: the first of torch's many, and what to do."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"the weights that workers of {device} share cannot be held: {first}; see with nvidia-smi whether the GPU is well and who "
        "else uses it, or give each worker a GPU of its own (--prefill-devices, --decode-devices)"
    )


def serve(
    listener: socket.socket,
    load: Callable[[], Callable[[], bytes]],
    first_user_s: float = FIRST_USER_S,
    unused_s: float = UNUSED_S,
) -> None:
    """Call ``load`` for a function that makes one message a user; answer users until there have been none for ``unused_s``."""
    loaded: list[Callable[[], bytes]] = []
    failure: list[BaseException] = []
    done_read, done_write = os.pipe()

    def run() -> None:
        try:
            loaded.append(load())
        except BaseException as error:
            failure.append(error)
        os.write(done_write, b".")

    threading.Thread(target=run, name="load", daemon=True).start()
    users: list[socket.socket] = []
    answered: list[socket.socket] = []
    patience_s = first_user_s
    try:
        while True:
            watched: list[socket.socket | int] = [listener, *answered, *([] if loaded else [done_read])]
            ready, _, _ = select.select(watched, [], [], patience_s if not users else None)
            if failure:
                raise failure[0]
            if not ready:
                return
            for source in ready:
                if source is listener:
                    user, _ = listener.accept()
                    if same_user(user):
                        users.append(user)
                    else:
                        user.close()
                elif isinstance(source, socket.socket):  # a user never sends, so it has left
                    source.close()
                    users.remove(source)
                    answered.remove(source)
                    patience_s = unused_s
            if loaded:
                for user in [user for user in users if user not in answered]:
                    try:
                        send_message(user, loaded[0]())
                        answered.append(user)
                    except OSError:
                        user.close()
                        users.remove(user)
    finally:
        for user in users:
            user.close()
        os.close(done_read)


def _load(spec: WorkerSpec) -> Callable[[], bytes]:
    require_gpu()
    from relay.kernels.cuda.holding import hold_weights
    from relay.models.llama import build_program

    pack = open_pack(spec)
    moved = report_for("holder", spec.pack_path, spec.device).moved
    program = build_program(pack.config)
    return hold_weights(program, pack, spec.device, spec.kv_cache_dtype, spec.quantization == "int8", moved)


if __name__ == "__main__":
    main()

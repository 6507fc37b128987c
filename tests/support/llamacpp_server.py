"""A llama.cpp server as a process: `python -m tests.support.llamacpp_server MODEL.gguf NAME`; prints its URL. Needs `xllamacpp`."""

import sys
import threading

import xllamacpp


def main() -> None:
    path, name = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {name}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel = 4096, 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.endpoint_metrics = params.endpoint_props = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

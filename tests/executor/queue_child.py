"""A process at one end of a queue, for tests that kill it. Arguments: what to do, and the pickled end."""

import pickle
import sys
import time

from jaxllm.executor.shm_queue import QueueReader, QueueWriter


def main(what: str, end: str) -> None:
    queue_end = pickle.loads(bytes.fromhex(end))
    if what == "echo":
        reader, writer = QueueReader(queue_end[0]), QueueWriter(queue_end[1])
        while True:
            writer.put(reader.get())
    if what == "read one":
        reader = QueueReader(queue_end)
        reader.get()
        print("ready", flush=True)
        time.sleep(60)
    if what == "write part":
        # More than the ring holds: nobody reads, so it is stuck in the midst of its second message.
        writer = QueueWriter(queue_end)
        writer.put([b"whole"])
        print("ready", flush=True)
        writer.put([b"x" * 10_000])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank with a watchdog and without MPI, for tests: `watchdog_rank.py RANK WORLD HEARTBEAT_S [PORT SECRET]`.

Rank 0 writes "port secret". Every rank writes "up" once all are connected, then obeys lines on stdin:
"raise", "config", "close", "hold SECONDS" (with the interpreter locked), "allow SECONDS" (of silence),
"leave" (without a goodbye), "wake" (the others), "doze SECONDS" (and writes whether and when it was woken).
"""

import ctypes
import sys
import time

from fastserve_hpc.errors import ConfigError, StoppedError
from fastserve_hpc.parallel.topology import Topology
from fastserve_hpc.parallel.watchdog import Watchdog
from fastserve_hpc.parallel.watchdog_join import Listener, Rendezvous


def say(text: str) -> None:
    print(text, flush=True)


def meeting() -> "Listener | Rendezvous":
    if len(sys.argv) == 4:
        listener = Listener(one_host=True)
        say(f"{listener.rendezvous.port} {listener.rendezvous.secret.hex()}")
        return listener
    return Rendezvous(("127.0.0.1",), int(sys.argv[4]), bytes.fromhex(sys.argv[5]))


def obey(watchdog: Watchdog, words: list[str]) -> None:
    if words[0] == "raise":
        raise ZeroDivisionError("the test asked for it")
    if words[0] == "config":
        raise ConfigError("--tp 3 makes no sense here")
    if words[0] == "stop":
        raise StoppedError("told to stop")
    if words[0] == "hold":
        ctypes.PyDLL(None).usleep(int(float(words[1]) * 1e6))
    if words[0] == "allow":
        watchdog.allow_silence(float(words[1]))
    if words[0] == "wake":
        watchdog.wake_others()
    if words[0] == "doze":
        begin = time.monotonic()
        say(f"{watchdog.doze(float(words[1]))} {time.monotonic() - begin:.3f}")
    if words[0] == "leave":
        sys.exit(3)
    if words[0] == "close":
        watchdog.close()
        sys.exit(0)


def main() -> None:
    rank, world, heartbeat_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    topology = Topology(rank, 1, world)
    watchdog = Watchdog.start(topology, meeting(), heartbeat_s, on_abort=lambda _: say("tidied"), start_s=20)
    say("up")
    try:
        for line in sys.stdin:
            obey(watchdog, line.split())
            say("obeyed")
    except Exception as error:
        watchdog.abort(error)


main()

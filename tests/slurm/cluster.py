"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd on free ports of loopback."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")


def missing() -> list[str]:
    """Programs that are not installed; Debian has them in munge, slurmctld, slurmd and slurm-client."""
    return [name for name in PROGRAMS if _find(name) is None]


class Cluster:
    """Runs inside `with`; `folder` gets its configuration, state and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host, (controller, *ports) = socket.gethostname().split(".")[0], _free_ports(3)
        nodes = {host: ports[0], f"{host}-second": ports[1]}  # jobs of one node get the first, whose name resolves
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()} Weight={weight}"
            for weight, (name, port) in enumerate(nodes.items(), start=1)
        ]
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
{os.linesep.join(lines)}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        munge = ("--key-file", "--socket", "--pid-file", "--log-file", "--seed-file")
        files = ("munge.key", "munge.socket", "munge.pid", "munge.log", "munge.seed")
        options = [part for f, n in zip(munge, files, strict=True) for part in (f, str(self.folder / n))]
        self._start("munged", "--foreground", "--force", *options)
        self._wait((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for name in nodes:
            self._start("slurmd", "-D", "-N", name)
        self._wait(self.idle)
        return self

    def __exit__(self, *exception: object) -> None:
        if len(self._daemons) == 4:
            self.run("scancel", "--user", getpass.getuser())
            self._wait(lambda: not self.run("squeue", "--noheader"))
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(timeout=600)

    def run(self, *command: str, **environment: str) -> str:
        """Standard output of a command of Slurm's; its errors are raised, but for those of a controller that starts."""
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment}
        finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        if finished.returncode and command[0] != "sinfo":
            raise RuntimeError(f"{' '.join(command)}: {finished.stderr}")
        return finished.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED..."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job)
        return next(part.removeprefix("JobState=") for part in shown.split() if part.startswith("JobState="))

    def idle(self) -> bool:
        """Whether both nodes have nothing to do and nothing to clean up."""
        return self.run("sinfo", "--noheader", "--format=%D %T") == "2 idle"

    def _start(self, name: str, *options: str) -> None:
        path = _find(name)
        assert path is not None
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as out:
            self._daemons.append(subprocess.Popen([path, *options], env=env, stdout=out, stderr=out))

    def _wait(self, ready: object) -> None:
        deadline = time.monotonic() + 600
        while not ready():  # type: ignore[operator]
            died = [d.args for d in self._daemons if d.poll() is not None]
            if died or time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-1500:] for p in self.folder.glob("*.out"))
                raise RuntimeError(f"Slurm does not start; ended: {died}\n{logs}")
            time.sleep(0.2)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports

#!/usr/bin/env bash
# A SLURM of one node on this machine, for the tests: `slurm.sh up FOLDER` and `slurm.sh down
# FOLDER`. Needs root and the Debian packages slurm-wlm and munge; `up` prints the path of the
# slurm.conf, to be given to srun as SLURM_CONF.
set -euo pipefail
action=$1
folder=$(realpath -m "$2")

up() {
  mkdir -p "$folder"/{munge,state,spool}
  chmod 755 "$folder"
  chown -R munge:munge "$folder/munge"
  chmod 700 "$folder/munge"
  runuser -u munge -- dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 status=none
  chmod 400 "$folder/munge/key"
  runuser -u munge -- /usr/sbin/munged --force --key-file="$folder/munge/key" \
    --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
  chmod 755 "$folder/munge"
  local host
  host=$(hostname -s)
  cat > "$folder/slurm.conf" <<END
ClusterName=one
FirstJobId=$3
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$3
SlurmdPort=$4
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
END
  slurmctld -f "$folder/slurm.conf"
  slurmd -f "$folder/slurm.conf"
  for _ in $(seq 100); do
    if SLURM_CONF=$folder/slurm.conf sinfo -h -o %t 2>/dev/null | grep -q idle; then
      echo "$folder/slurm.conf"
      return
    fi
    sleep 0.2
  done
  tail -n 5 "$folder"/slurm*.log >&2
  return 1
}

down() {
  local file
  for file in slurmd.pid slurmctld.pid munge/pid; do
    [ ! -s "$folder/$file" ] || kill "$(cat "$folder/$file")" 2>/dev/null || true
  done
}

"$action" "$@"

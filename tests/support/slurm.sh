#!/usr/bin/env bash
# A SLURM of one or more nodes on this machine, for the tests: `slurm.sh up FOLDER CONTROLLER_PORT
# NODE_PORT [NODES]`, of which there is one by default and n1, n2, ... listen on ports from the
# second on, `slurm.sh node FOLDER n2` to start that again, and `slurm.sh down FOLDER`. Needs root
# and the Debian packages slurm-wlm and munge; `up` prints the path of the slurm.conf, to be given
# to srun as SLURM_CONF.
set -euo pipefail
action=$1
folder=$(realpath -m "$2")

up() {
  local nodes=${5:-1} index
  mkdir -p "$folder"/{munge,state} $(seq -f "$folder/spool-n%g" "$nodes")
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
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
KillWait=5
$(for index in $(seq "$nodes"); do
    echo "NodeName=n$index NodeHostname=$host NodeAddr=127.0.0.1 Port=$(($4 + index - 1)) CPUs=2"
  done)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
END
  slurmctld -f "$folder/slurm.conf"
  for index in $(seq "$nodes"); do node up "$folder" "n$index"; done
  for _ in $(seq 100); do
    if [ "$(SLURM_CONF=$folder/slurm.conf sinfo -h -N -o %t 2>/dev/null | grep -c idle)" \
      = "$nodes" ]; then
      echo "$folder/slurm.conf"
      return
    fi
    sleep 0.2
  done
  tail -n 5 "$folder"/slurm*.log >&2
  return 1
}

node() {
  slurmd -N "$3" -f "$folder/slurm.conf"
}

down() {
  local file
  for file in "$folder"/slurmd-*.pid "$folder"/{slurmctld.pid,munge/pid}; do
    [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
  done
}

"$action" "$@"

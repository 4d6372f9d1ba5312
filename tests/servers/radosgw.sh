#!/usr/bin/env bash
# Run Ceph's S3 gateway over a cluster of one monitor and one disk in memory, all on 127.0.0.1, until it is killed.
#   tests/servers/radosgw.sh DIRECTORY    an empty one, for configuration, monitor and logs
# Says "radosgw listens on port N"; the user and the secret are "tests". Debian has it all:
#   apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
set -euo pipefail
dir=$(realpath "$1")
export CEPH_CONF=$dir/ceph.conf
free_ports() {
  python3 -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in held))'
}
read -r mon_port rgw_port < <(free_ports)
fsid=$(cat /proc/sys/kernel/random/uuid)

cat > "$CEPH_CONF" << CONF
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$mon_port/0
public addr = 127.0.0.1
keyring = $dir/keyring
run dir = $dir
admin socket = $dir/\$name.asok
log file = $dir/\$name.log
mon data = $dir/mon
osd data = $dir/osd
rgw data = $dir/rgw
osd objectstore = memstore
memstore device bytes = 2147483648
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon pg warn on pool no redundancy = false
mon warn on pool no redundancy = false
rgw frontends = beast endpoint=127.0.0.1:$rgw_port
rgw enable usage log = false
CONF

pids=()
stop() { ((${#pids[@]})) && kill -KILL "${pids[@]}" 2> /dev/null; }
trap stop EXIT
trap 'exit 1' TERM INT
with_me() { exec setpriv --pdeathsig KILL "$@"; } # ends them even where this script is ended by SIGKILL

mkdir -p "$dir/mon" "$dir/osd" "$dir/rgw"
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port/0]" "$dir/monmap" > "$dir/setup.log"
ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon "allow *" >> "$dir/setup.log"
ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon "allow *" --cap osd "allow *" >> "$dir/setup.log"
ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring" >> "$dir/setup.log" 2>&1
with_me ceph-mon -i a -f > "$dir/mon.out" 2>&1 &
pids+=($!)
ceph osd create >> "$dir/setup.log" 2>&1
ceph auth get-or-create osd.0 mon "allow profile osd" osd "allow *" >> "$dir/keyring"
ceph-osd -i 0 --mkfs >> "$dir/setup.log" 2>&1
with_me ceph-osd -i 0 -f > "$dir/osd.out" 2>&1 &
pids+=($!)
radosgw-admin user create --uid tests --display-name tests --access-key tests --secret tests >> "$dir/setup.log" 2>&1
with_me radosgw -n client.admin -f > "$dir/rgw.out" 2>&1 &
pids+=($!)
until (exec 3<> "/dev/tcp/127.0.0.1/$rgw_port") 2> /dev/null; do
  kill -0 "${pids[@]}"
  sleep 0.2
done
echo "radosgw listens on port $rgw_port"
wait -n "${pids[@]}"

#!/bin/sh
# One emulated host. Started in fresh namespaces, it makes them look like a machine of its own, says
# "ready" and stays until it is killed; with the last process inside go the namespaces and the link.
#   host.sh NAME ADDRESS ETC_HOSTS SWITCH_PID SWITCH_PORT TBF_ARGUMENTS...
set -eu
name=$1 address=$2 etc_hosts=$3 switch=$4 port=$5
shift 5

hostname "$name"

# A first tmpfs keeps what is mounted elsewhere, and the second, which is the host's /dev/shm, hides
# it: no file of the machine is written, none is left behind.
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
printf '%s\n' "$etc_hosts" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
# The old /sys lists the machine's network devices. Where a new one is refused the old one stays.
mkdir /dev/shm/cgroup
if mount --rbind /sys/fs/cgroup /dev/shm/cgroup 2>/dev/null && mount -t sysfs sysfs /sys 2>/dev/null
then
  mount --rbind /dev/shm/cgroup /sys/fs/cgroup
fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm

# One address a host: with IPv6 a library might choose the link-local one.
echo 1 2>/dev/null > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
ip link set lo up
ip link add eth0 mtu 1500 type veth peer name "$port" mtu 1500 netns "$switch"
ip address add "$address/24" dev eth0
tc qdisc add dev eth0 root handle 1: tbf "$@"
nsenter --target "$switch" --net sh -euc '
  port=$0
  tc qdisc add dev "$port" root handle 1: tbf "$@"
  ip link set "$port" master br0 up' "$port" "$@"
ip link set eth0 up
echo ready
exec sleep infinity > /dev/null 2>&1

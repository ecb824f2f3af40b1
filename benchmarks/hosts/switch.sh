#!/bin/sh
# The bridge that joins the hosts, in a network namespace of its own: neither addresses nor firewall
# of the machine see its traffic. Says "ready" and stays until it is killed.
set -eu
echo 1 2>/dev/null > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
ip link set lo up
ip link add br0 type bridge forward_delay 0
ip link set br0 up
echo ready
exec sleep infinity > /dev/null 2>&1

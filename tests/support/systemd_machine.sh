# How the first process of a machine of its own comes to be: see systemd_machine.py.
#     systemd_machine.sh outside FOLDER SYSTEMD    as root, in a mount namespace of its own
#     systemd_machine.sh inside FOLDER SYSTEMD     in all the others as well; becomes SYSTEMD
set -eu
folder=$2
group=/sys/fs/cgroup/kd-test-$$

if [ "$1" = outside ]; then
    mount -t tmpfs none /sys/fs/cgroup # a cgroup2 could not be mounted over another one
    mount -t cgroup2 none /sys/fs/cgroup
    mkdir "$group"
    echo $$ >"$group/cgroup.procs"
    setpriv --pdeathsig KILL unshare --cgroup --pid --mount --uts --ipc --fork --kill-child \
        sh "$0" inside "$folder" "$3" &
    inside=$!
    echo $$ >/sys/fs/cgroup/cgroup.procs
    # Whoever wanted it has ended; a signal to the whole group has ended the other already.
    trap 'kill -KILL $inside 2>/dev/null || true' TERM INT HUP
    wait || true
    tries=0 # what was killed takes a moment
    until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || [ $tries = 50 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    exit
fi

mount -t proc -o nosuid,nodev,noexec none /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys # the kernel's settings are those of all
umount /sys/fs/cgroup
mount -t cgroup2 -o nosuid,nodev,noexec none /sys/fs/cgroup
hostname kd-test
mount -t tmpfs -o mode=755 none /run
mount -t tmpfs -o mode=755 none /etc/systemd
mkdir -p /run/sshd /run/kd-person /etc/systemd/system
mount --bind "$folder/units" /etc/systemd/system
mount --bind "$folder/home" /run/kd-person
[ -e /etc/machine-id ] || : >/etc/machine-id # systemd would write one that is all machines'
for name in passwd group shadow machine-id; do
    mount --bind "$folder/$name" "/etc/$name"
done
[ ! -e /etc/sudoers ] || mount --bind "$folder/sudoers" /etc/sudoers
# Its units are these alone: what Debian's would do is of this machine as a whole.
exec env -i container=kd-test PATH="$PATH" \
    SYSTEMD_UNIT_PATH="/etc/systemd/system:/run/systemd/system:$folder/own" \
    "$3" --system --unit=multi-user.target --log-target=console --show-status=false

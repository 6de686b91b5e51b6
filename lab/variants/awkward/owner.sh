# A clock on the wall of another country.
ln -sfn /usr/share/zoneinfo/Asia/Kolkata /etc/localtime
# A small tool of the owner's, running and with a past; images lie in containerd's store.
tar -C / -c usr/bin/busybox | docker import --change 'CMD ["/usr/bin/busybox", "sleep", "1000000"]' - home/assistant:2026.7
docker run -d --name assistant --restart unless-stopped --stop-timeout 1 home/assistant:2026.7
docker run --name backup home/assistant:2026.7 /usr/bin/busybox true
# Weights from another tool, in the home of the login.
install -d -o spark -g spark /home/spark/models
head -c 1000000 /dev/zero | tr '\0' 'g' >/home/spark/models/tiny-q4.gguf
chown spark: /home/spark/models/tiny-q4.gguf

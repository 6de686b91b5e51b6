# The installer's profile of the management port, in the form NetworkManager gives its own on Ubuntu.
uuid=8d5c1b42-6f0e-4a57-9d0b-5f2f5a1c7e31
file=/etc/netplan/90-NM-$uuid.yaml
cat > $file <<YAML
network:
  version: 2
  ethernets:
    NM-$uuid:
      renderer: NetworkManager
      match: {name: eth0}
      addresses: [$(ip -4 -o addr show eth0 | awk '{print $4}'), "fd00:7::5/64"]
      routes: [{to: default, via: $(ip -4 route show default | awk '{print $3}')}]
      networkmanager: {uuid: $uuid, name: Wired connection 1}
YAML
chmod 600 /etc/netplan/*.yaml
# The lab configured the port from outside; from here on NetworkManager does.
ip address flush dev eth0
netplan apply
nm-online -q -t 30

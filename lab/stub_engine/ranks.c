/* Several hosts as one engine: the head waits for every rank, and all keep their connections. */
#include "stub.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in of_master(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)config.master_port)};
    inet_pton(AF_INET, config.master_addr, &address.sin_addr);
    return address;
}

/* Like the engine's store it listens on every address, and a rank that goes stops nothing here. */
static void gather(void) {
    struct sockaddr_in address = of_master();
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) {
        perror("master port");
        exit(1);
    }
    say("waiting for %d ranks", config.nnodes - 1);
    for (int rank = 1; rank < config.nnodes; rank++)
        if (accept(listener, NULL, NULL) < 0) rank--;
}

static void join(void) {
    struct sockaddr_in address = of_master();
    for (int tries = 0; tries < 3000; tries++, usleep(100000)) {
        int head = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(head, (struct sockaddr *)&address, sizeof address)) return;
        close(head);
    }
    say("ERROR the head did not listen");
    exit(1);
}

void meet_ranks(void) {
    if (config.nnodes < 2) return;
    if (config.node_rank == 0) {
        gather();
        return;
    }
    join();
    say("rank %d has joined", config.node_rank);
    for (;;) pause(); /* computes for the head, and hears of its end from nobody */
}

/* Publishes bare bytes to a JetStream stream with libnats, asynchronously and with a Msg-Id each: what `gyre bench log`
 * compares its typed appends to. Prints the wall and CPU seconds from the first publish to the last acknowledgement.
 *
 *   gcc -O2 -o publish benchmarks/publish.c -lnats      (Debian: gcc, libnats-dev)
 *   publish URL SUBJECT NUM_MESSAGES NUM_BYTES WINDOW
 */
#include <nats/nats.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int num_errors;

static void refused(jsCtx *js, jsPubAckErr *error, void *closure) {
    (void)js, (void)closure;
    if (num_errors++ == 0)
        fprintf(stderr, "publish: %s\n", error->ErrText != NULL ? error->ErrText : natsStatus_GetText(error->Err));
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void check(natsStatus status, const char *what) {
    if (status != NATS_OK) {
        fprintf(stderr, "publish: %s: %s\n", what, natsStatus_GetText(status));
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: publish URL SUBJECT NUM_MESSAGES NUM_BYTES WINDOW\n");
        return 2;
    }
    const char *subject = argv[2];
    long num = atol(argv[3]);
    int size = atoi(argv[4]);
    natsConnection *connection = NULL;
    jsCtx *js = NULL;
    jsOptions options;
    jsPubOptions publish;
    char id[33];
    char *body = malloc(size);
    for (int i = 0; i < size; i++)
        body[i] = (char)(i * 131 + 17);

    check(natsConnection_ConnectTo(&connection, argv[1]), "connect");
    check(jsOptions_Init(&options), "options");
    options.PublishAsync.MaxPending = atol(argv[5]);
    options.PublishAsync.StallWait = 60000;
    options.PublishAsync.ErrHandler = refused;
    check(natsConnection_JetStream(&js, connection, &options), "JetStream");
    check(jsPubOptions_Init(&publish), "options");
    publish.MsgId = id;

    double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (long i = 0; i < num; i++) {
        snprintf(id, sizeof id, "%032lx", i);
        check(js_PublishAsync(js, subject, body, size, &publish), "send");
    }
    check(js_PublishAsyncComplete(js, NULL), "acknowledgements");
    wall = seconds(CLOCK_MONOTONIC) - wall, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;

    jsCtx_Destroy(js);
    natsConnection_Destroy(connection);
    nats_Close();
    free(body);
    if (num_errors > 0)
        return 1;
    printf("%.6f %.6f\n", wall, cpu);
    return 0;
}

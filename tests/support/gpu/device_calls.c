/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions of CUDA's runtime and of NCCL that csrc/device calls, which do nothing but note it. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static char noted[4096];
static size_t length;
static unsigned long made;
static unsigned flags_of_last;

volatile int launch_looks; /* how often ncclCommGetAsyncError says "in progress" for a transfer */
volatile int not_reached;  /* of cudaEventQuery: how often it says so; -1: always */
volatile int query_stands; /* while it is not 0, cudaEventQuery does not return */
volatile int query_fails;  /* its error */
volatile int standing;     /* whether a thread is in there */
volatile int refuses;      /* an error of ncclSend and ncclRecv */
volatile int launches_asked, events_asked; /* how often, for a launch and for an event */
static int looks;

static void note(char letter) {
    if (length + 1 < sizeof noted) noted[length++] = letter;
}
const char* calls(void) { return noted; }
void forget_calls(void) { memset(noted, 0, sizeof noted), length = 0; }
unsigned long events_made(void) { return made; }
unsigned event_flags(void) { return flags_of_last; }

volatile int captures;       /* whether some thread captures a CUDA graph in the mode "global" */
volatile int capture_broken; /* whether one in that mode has asked something meanwhile */
static _Thread_local int capture_mode; /* as CUDA's: global */
int cudaThreadExchangeStreamCaptureMode(int* mode) {
    int before = capture_mode;
    return capture_mode = *mode, *mode = before, 0;
}

static _Thread_local int device; /* as CUDA's: the first in each thread */
volatile int made_on = -1;

int cudaGetDevice(int* current) { return *current = device, 0; }
int cudaSetDevice(int next) { return device = next, 0; }
int cudaEventCreateWithFlags(void** event, unsigned flags) {
    made_on = device;
    flags_of_last = flags;
    *event = (void*)++made;
    return 0;
}
int cudaEventRecord(void* event, void* stream) { return (void)event, note((size_t)stream == 7 ? 'L' : 'C'), 0; }
int cudaEventQuery(void* event) {
    (void)event, ++events_asked;
    while (query_stands) standing = 1, usleep(1000);
    standing = 0;
    if (captures && capture_mode == 0) return capture_broken = 1, 900;
    if (query_fails) return query_fails;
    if (not_reached > 0) --not_reached;
    return not_reached ? 600 : 0;
}
int cudaEventDestroy(void* event) { return (void)event, 0; }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
    return (void)event, (void)flags, note((size_t)stream == 7 ? 'l' : 'c'), 0;
}
const char* cudaGetErrorString(int error) { return error ? "an error of CUDA" : "no error"; }

static int transfer(char letter) {
    note(letter);
    looks = launch_looks;
    return refuses;
}
int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, void* stream) {
    return (void)from, (void)count, (void)type, (void)peer, (void)communicator, (void)stream, transfer('S');
}
int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, void* stream) {
    return (void)to, (void)count, (void)type, (void)peer, (void)communicator, (void)stream, transfer('R');
}
int ncclCommGetAsyncError(void* communicator, int* state) {
    (void)communicator, ++launches_asked;
    *state = looks < 0 || looks-- > 0 ? 7 : 0;
    if (*state == 0) looks = 0;
    return 0;
}
const char* ncclGetErrorString(int error) { return error == 6 ? "remote process exited" : "no error"; }
const char* ncclGetLastError(void* communicator) { return (void)communicator, "the peer closed its socket"; }
int ncclGetVersion(int* version) { return *version = 22907, 0; }
int ncclGetUniqueId(void* id) { return (void)id, 0; }
int ncclCommFinalize(void* communicator) { return (void)communicator, 0; }
int ncclCommDestroy(void* communicator) { return (void)communicator, 0; }
int ncclCommAbort(void* communicator) { return (void)communicator, 0; }
int ncclCommInitRankConfig(void** communicator, ...) { return *communicator = (void*)1, 0; }

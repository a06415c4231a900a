/* A GPU that computes nothing. Device memory is mapped twice: at the address that callers see nothing can be read or
   written (a host that touches it gets SIGSEGV, as with a GPU), and at another one that only the stub uses. An address is
   never given twice, so that whoever uses freed memory is found. Kernels do nothing, copies are copies; both are done
   when somebody waits for them, so that whoever does not wait reads what was there before.

   Tests look at the counts and ask for faults through a file that is mapped by both (CUDA_STUB_CONTROL; stub.py).
   Environment: CUDA_STUB_DEVICES (1), CUDA_STUB_CAPABILITY (89), CUDA_STUB_MEMORY (bytes of each device, 24 GiB),
   CUDA_STUB_MIG (the device that is a part of a GPU; none). */
#define _GNU_SOURCE
#include "control.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROOM (256ul << 30) /* addresses of each device, not memory */

struct control *control;
pthread_mutex_t lock;
static long setting(const char *name, long usual) { const char *value = getenv(name); return value ? atol(value) : usual; }

static void __attribute__((constructor)) begin(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &recursive);
    const char *path = getenv("CUDA_STUB_CONTROL");
    int file = path ? open(path, O_RDWR | O_CREAT, 0600) : memfd_create("cuda-stub-control", 0);
    if (file < 0 || ftruncate(file, sizeof *control)) { perror("cuda stub: CUDA_STUB_CONTROL"); abort(); }
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (control == MAP_FAILED) { perror("cuda stub"); abort(); }
    control->magic = sizeof *control;
}

void note(const char *name, long bytes) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < control->rows && strcmp(control->row[i].name, name)) i++;
    if (i < ROWS) {
        struct row *row = &control->row[i];
        if (i == control->rows) { snprintf(row->name, sizeof row->name, "%s", name); control->rows++; }
        row->calls++, row->bytes += bytes;
        if (bytes > row->largest) row->largest = bytes;
    }
    pthread_mutex_unlock(&lock);
}

void wrong(const char *what, const char *who) {
    char text[104];
    snprintf(text, sizeof text, "WRONG: %s: %s", who, what);
    note(text, 0);
}

void holds(int more) { __atomic_add_fetch(&control->handles, more, __ATOMIC_SEQ_CST); }
void library_holds(int more) { __atomic_add_fetch(&control->library_handles, more, __ATOMIC_SEQ_CST); }

/* -- devices ------------------------------------------------------------------------------------------------ */

static __thread int current = -1;
int device_count(void) { long n = setting("CUDA_STUB_DEVICES", 1); return n > DEVICES ? DEVICES : (int)n; }
int is_part(int device) { return setting("CUDA_STUB_MIG", -1) == device; }
int compute_capability(void) { return (int)setting("CUDA_STUB_CAPABILITY", 89); }
size_t total_bytes(void) { return (size_t)setting("CUDA_STUB_MEMORY", 24l << 30); }
size_t free_bytes(int device) { return total_bytes() - (size_t)control->device_bytes[device]; }
int current_device(void) { return current; }
int make_current(int device) {
    if (device < -1 || device >= device_count()) return INVALID_DEVICE;
    current = device;
    return OK;
}
static int lost_by(void) { return control->lost_by ? (int)control->lost_by : DEVICE_LOST; }
int lost(void) { return control->lost && control->lost == current + 1 ? lost_by() : OK; }

const char *error_name(int error) {
    switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case NO_MEMORY: return "out of memory";
    case INVALID_PITCH: return "invalid pitch argument";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NO_CONTEXT: return "invalid device context";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case NOT_READY: return "device not ready";
    case LAUNCH_FAILED: return "too many resources requested for launch";
    case 716: return "misaligned address";
    case DEVICE_LOST: return "unspecified launch failure";
    case WHILE_RECORDING: return "operation not permitted when stream is capturing";
    case RECORDING_BROKEN: return "operation failed due to a previous error during capture";
    default: return "unknown error";
    }
}

/* -- memory ------------------------------------------------------------------------------------------------- */

static struct { char *seen, *mine; size_t end; int file; } space[DEVICES];
static struct piece { char *at; size_t size, asked; int where, device; struct piece *next; } *pieces;

static int prepare_space(int d) {
    if (space[d].seen) return 1;
    space[d].file = memfd_create("cuda-stub", 0);
    if (space[d].file < 0 || ftruncate(space[d].file, ROOM)) return 0;
    char *seen = mmap(NULL, ROOM, PROT_NONE, MAP_SHARED | MAP_NORESERVE, space[d].file, 0);
    char *mine = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, space[d].file, 0);
    if (seen == MAP_FAILED || mine == MAP_FAILED) return 0;
    space[d].seen = seen, space[d].mine = mine;
    return 1;
}

static int device_of(const void *p) {
    for (int d = 0; d < DEVICES; d++)
        if (space[d].seen && (char *)p >= space[d].seen && (char *)p < space[d].seen + ROOM) return d;
    return -1;
}
void *real(const void *p) {
    int d = device_of(p);
    return d < 0 ? (void *)p : space[d].mine + ((char *)p - space[d].seen);
}

static struct piece *piece_at(const void *p) {
    for (struct piece *each = pieces; each; each = each->next)
        if ((char *)p >= each->at && (char *)p < each->at + each->size) return each;
    return NULL;
}

int fails_on_demand(const char *name) {
    if (!control->fail_call || strcmp(control->fail_name, name)) return OK;
    pthread_mutex_lock(&lock);
    int fails = control->fail_call && --control->fail_call == 0;
    if (fails && control->fail_loses) control->lost = (current < 0 ? 0 : current) + 1;
    pthread_mutex_unlock(&lock);
    return !fails ? OK : control->fail_loses ? lost_by() : LAUNCH_FAILED;
}

int refused_on_demand(void) {
    control->allocations++;
    if (control->fail_allocation > 1) { control->fail_allocation--; return 0; }
    if (control->fail_allocation != 1) return 0;
    if (control->fail_times && --control->fail_times == 0) control->fail_allocation = 0;
    return 1;
}

int allocate(void **address, size_t bytes, int where) {
    size_t size = (bytes ? bytes + 511 : 512) / 512 * 512;
    if (current < 0) return NO_CONTEXT;
    if (lost()) return lost();
    pthread_mutex_lock(&lock);
    int error = OK;
    char *at = NULL;
    if (refused_on_demand()) error = NO_MEMORY;
    else if (where == ON_DEVICE) {
        if (!prepare_space(current) || size > free_bytes(current) || space[current].end + size > ROOM) error = NO_MEMORY;
        else at = space[current].seen + space[current].end, space[current].end += size + 4096 - size % 4096;
    } else {
        at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) error = NO_MEMORY;
    }
    if (!error) {
        struct piece *made = calloc(1, sizeof *made);
        *made = (struct piece){at, size, bytes, where, current, pieces};
        pieces = made;
        if (where == ON_DEVICE) {
            control->device_bytes[current] += size;
            memset(real(at), 0xA5, size < 65536 ? size : 65536); /* CUDA's memory is not zeroed either */
        } else { control->pinned_bytes += size; memset(at, 0xA5, size); }
        *address = at;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int release(void *address, int where, const char *who) {
    if (!address) return OK;
    wait_for_all(); /* what was asked for before may still use it */
    pthread_mutex_lock(&lock);
    struct piece **link = &pieces;
    while (*link && ((*link)->at != address || (*link)->where != where)) link = &(*link)->next;
    struct piece *found = *link;
    if (found) {
        *link = found->next;
        if (where == ON_DEVICE) {
            control->device_bytes[found->device] -= found->size;
            fallocate(space[found->device].file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      found->at - space[found->device].seen, found->size);
        } else { control->pinned_bytes -= found->size; munmap(found->at, found->size); }
        if (where == ON_DEVICE && found->device != current) wrong("memory of another device", who);
        free(found);
    } else wrong("freed what is not allocated", who);
    pthread_mutex_unlock(&lock);
    return !found ? INVALID_VALUE : lost();
}

int where_is(const void *p, int *device) {
    int d = device_of(p);
    if (device) *device = d;
    if (d >= 0) return ON_DEVICE;
    pthread_mutex_lock(&lock);
    struct piece *found = piece_at(p);
    if (device && found) *device = found->device;
    pthread_mutex_unlock(&lock);
    return found ? PINNED : PAGEABLE;
}

/* A copy that goes beyond what was allocated is a fault that a GPU may or may not report. */
int inside(const char *who, const void *p, size_t bytes) {
    if (device_of(p) < 0 || !bytes) return 1;
    struct piece *found = piece_at(p);
    if (found && (char *)p + bytes <= found->at + found->size) return 1;
    wrong("outside of allocated memory", who);
    return 0;
}

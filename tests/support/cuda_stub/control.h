/* What device.c and streams.c share: the file that tests look into, and the lock of all of it. */
#pragma once
#include "device.h"
#include <pthread.h>

#define DEVICES 8
#define ROWS 1024

/* stub.py has the same layout. */
extern struct control {
    long magic;
    long fail_allocation; /* the n-th one from now fails, and then all of them until it is 0 again; 0: none */
    long fail_times;       /* only that one */
    long fail_launch;     /* the n-th launch from now fails, alone */
    long lost;            /* a device's number + 1: it answers nothing any more */
    long lost_by;         /* the error that it says then; 0: DEVICE_LOST */
    char fail_name[104];  /* the function whose n-th call from now fails, or loses its device; n = 0: none */
    long fail_call;
    long fail_loses;
    long allocations, launches; /* so far */
    long pinned_bytes, streams, events, graphs; /* that there are now */
    long handles, library_handles; /* pools and modules; what cuBLAS, cuDNN and the others have made */
    long device_bytes[DEVICES];
    long rows;
    struct row { char name[104]; long calls, bytes, largest; } row[ROWS];
} *control;

extern pthread_mutex_t lock; /* recursive */
int refused_on_demand(void); /* whether this allocation is to fail */
int inside(const char *who, const void *p, size_t bytes);

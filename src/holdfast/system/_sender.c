/* Notes in shared memory, the moment a signal arrives, what cannot be known later; then does what would have been done
without it. Who sent it; for a fault in a mapped file, which file; and whether the thread that it hit holds the GIL.

Python's own handlers do not see siginfo, and `sigwaitinfo` needs the signal blocked, which every program that user
code starts would inherit. The sender's command line is read here, inside the handler, because a `kill` is gone a
moment later. Only calls that are allowed in a signal handler are made.

Optional: without a compiler the report says "sender unknown", see system/signal_origin.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#define MAP_LINE 512 /* bytes of a line of /proc/self/maps: addresses, rights, offset, device, inode, path */
#define LEVELS 6    /* the sender, its parent, and so on */
#define SENDER 900  /* bytes of the sender's command line: a JVM's main class stands behind all its options */
#define COMMAND 300 /* bytes of that of its parents */
#define WORD 120    /* bytes of one word: a class path may have thousands */
#define CUT 0x1e    /* what stands where the middle of a command line is left out */

/* As system/signal_origin.py reads it. */
struct note {
    int64_t serial; /* raised last: then the rest is whole */
    int64_t number, pid, uid, code, length, address;
    char text[]; /* per level: pid, tab, command line, newline; for a fault: its line of /proc/self/maps */
};

static struct note *page;
static int64_t room;
static int wake = -1; /* an eventfd: somebody waits for notes */
static pid_t owner;   /* whose signals are noted: a fork of it that has not installed its own only does the rest */
static struct sigaction before[NSIG];

static size_t put_number(char *to, int64_t value) {
    char digits[24];
    size_t count = 0, i = 0;
    do digits[count++] = (char)('0' + value % 10);
    while ((value /= 10) > 0);
    while (count) to[i++] = digits[--count];
    return i;
}

static ssize_t slurp(int64_t pid, const char *name, char *to, size_t size) {
    char path[64] = "/proc/";
    size_t at = 6 + put_number(path + 6, pid);
    while (*name) path[at++] = *name++;
    path[at] = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got = read(fd, to, size);
    close(fd);
    return got;
}

/* A command line in at most `size` bytes (SENDER is the most): long words are cut, then the middle is left out. */
static __attribute__((noinline)) size_t put_command(int64_t pid, char *to, size_t size) {
    char path[64] = "/proc/", chunk[256], last[SENDER];
    size_t at = 6 + put_number(path + 6, pid), head = size / 3, tail = size - head - 1, count = 0, word = 0;
    ssize_t got;
    for (const char *name = "/cmdline"; *name;) path[at++] = *name++;
    path[at] = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    while ((got = read(fd, chunk, sizeof chunk)) > 0)
        for (ssize_t i = 0; i < got; i++) {
            word = chunk[i] ? word + 1 : 0;
            if (word > WORD) continue;
            char c = word > WORD - 3 ? '.' : (unsigned char)chunk[i] < ' ' ? ' ' : chunk[i];
            if (count < head) to[count] = c;
            else last[(count - head) % tail] = c;
            count++;
        }
    close(fd);
    if (count <= head) return count;
    size_t behind = count - head, begin = 0;
    at = head;
    if (behind > tail) to[at++] = CUT, begin = behind % tail, behind = tail;
    for (size_t i = 0; i < behind; i++) to[at++] = last[(begin + i) % tail];
    return at;
}

static int64_t parent_of(int64_t pid) {
    char stat[512];
    ssize_t got = slurp(pid, "/stat", stat, sizeof stat), at = got - 1;
    while (at > 0 && stat[at] != ')') at--; /* the name may hold anything */
    at += 4;                                /* ") S " */
    int64_t parent = 0;
    for (; at < got && stat[at] >= '0' && stat[at] <= '9'; at++) parent = parent * 10 + (stat[at] - '0');
    return parent;
}

static uint64_t take_hex(const char **at) {
    uint64_t value = 0;
    for (;; (*at)++) {
        char c = **at;
        if (c >= '0' && c <= '9') value = value * 16 + (uint64_t)(c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (uint64_t)(c - 'a' + 10);
        else return value;
    }
}

/* The line of /proc/self/maps that an address lies in; 0 when it lies in none. */
static size_t mapping_of(uint64_t address, char *to) {
    char chunk[256], line[MAP_LINE + 1];
    size_t length = 0;
    ssize_t got;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    while ((got = read(fd, chunk, sizeof chunk)) > 0)
        for (ssize_t i = 0; i < got; i++) {
            if (chunk[i] != '\n') {
                if (length < MAP_LINE) line[length++] = chunk[i];
                continue;
            }
            line[length] = 0;
            const char *word = line;
            uint64_t first = take_hex(&word), last = *word == '-' ? (word++, take_hex(&word)) : 0;
            if (first <= address && address < last) {
                close(fd);
                for (size_t j = 0; j < length; j++) to[j] = line[j];
                return length;
            }
            length = 0;
        }
    close(fd);
    return 0;
}

static void go_on(int number, siginfo_t *info, void *context) {
    struct sigaction *old = &before[number];
    if (old->sa_flags & SA_SIGINFO)
        old->sa_sigaction(number, info, context);
    else if (old->sa_handler == SIG_DFL) { /* delivered when we return: until then all signals are blocked */
        sigaction(number, old, NULL);
        raise(number);
    } else if (old->sa_handler != SIG_IGN)
        old->sa_handler(number);
}

static void note(int number, siginfo_t *info, void *context) {
    int saved = errno;
    if (getpid() != owner) {
        go_on(number, info, context);
        errno = saved;
        return;
    }
    int fault = info->si_code > 0 && (number == SIGBUS || number == SIGSEGV || number == SIGFPE || number == SIGILL);
    page->number = number;
    page->pid = fault ? 0 : info->si_pid;
    page->uid = fault ? 0 : info->si_uid;
    page->code = info->si_code;
    page->address = fault ? (int64_t)(uintptr_t)info->si_addr : 0;
    size_t at = 0;
    if (fault && room > MAP_LINE) at = mapping_of((uint64_t)(uintptr_t)info->si_addr, page->text);
    int64_t pid = info->si_code > 0 ? 0 : info->si_pid; /* above 0 the kernel sent it, and there is no sender */
    for (int level = 0; level < LEVELS && pid > 0; level++) {
        size_t most = level ? COMMAND : SENDER;
        if (at + most + 32 >= (size_t)room) break;
        at += put_number(page->text + at, pid);
        page->text[at++] = '\t';
        at += put_command(pid, page->text + at, most);
        page->text[at++] = '\n';
        pid = parent_of(pid);
    }
    page->length = (int64_t)at;
    page->serial++;
    if (wake >= 0) {
        uint64_t one = 1;
        ssize_t written = write(wake, &one, sizeof one);
        (void)written;
    }
    go_on(number, info, context);
    errno = saved;
}

/* Writes 2 when the thread that this signal hit holds the GIL, 1 when it does not, 0 when that cannot be said. Only
reads an atomic and a thread-local value, as faulthandler does in the same place. */
static int64_t *gil_word;

static void look_at_gil(int number, siginfo_t *info, void *context) {
    int saved = errno;
#if defined(Py_GIL_DISABLED)
    *gil_word = 0;
#else
#if PY_VERSION_HEX >= 0x030D0000
    PyThreadState *running = PyThreadState_GetUnchecked();
#else
    PyThreadState *running = _PyThreadState_UncheckedGet();
#endif
    PyThreadState *mine = PyGILState_GetThisThreadState();
    *gil_word = mine == NULL ? 0 : running == mine ? 2 : 1;
#endif
    go_on(number, info, context);
    errno = saved;
}

/* install(address, size, numbers, wake=-1): from now on, signals with these numbers are noted at that address first, and
the eventfd `wake` is written to. */
static PyObject *install(PyObject *module, PyObject *args) {
    Py_ssize_t address, size;
    PyObject *numbers;
    int waiting = -1;
    if (!PyArg_ParseTuple(args, "nnO!|i", &address, &size, &PyTuple_Type, &numbers, &waiting)) return NULL;
    owner = getpid();
    wake = waiting;
    page = (struct note *)address;
    room = size - (Py_ssize_t)sizeof(struct note);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++) {
        long number = PyLong_AsLong(PyTuple_GET_ITEM(numbers, i));
        struct sigaction old, ours = {.sa_sigaction = note};
        if (PyErr_Occurred()) return NULL;
        if (number < 1 || number >= NSIG || sigaction((int)number, NULL, &old) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
        if ((old.sa_flags & SA_SIGINFO) && old.sa_sigaction == note) continue; /* ours already: a forked keeper's */
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (old.sa_flags & SA_RESTART);
        sigfillset(&ours.sa_mask);
        before[number] = old;
        if (sigaction((int)number, &ours, NULL) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* watch_gil(address, number): from now on, a signal with this number also looks at the GIL. */
static PyObject *watch_gil(PyObject *module, PyObject *args) {
    Py_ssize_t address;
    int number;
    struct sigaction old, ours = {.sa_sigaction = look_at_gil};
    if (!PyArg_ParseTuple(args, "ni", &address, &number)) return NULL;
    if (number < 1 || number >= NSIG || sigaction(number, NULL, &old) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    gil_word = (int64_t *)address;
    if (!(old.sa_flags & SA_SIGINFO) || old.sa_sigaction != look_at_gil) {
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (old.sa_flags & SA_RESTART);
        sigfillset(&ours.sa_mask);
        before[number] = old;
        if (sigaction(number, &ours, NULL) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"watch_gil", watch_gil, METH_VARARGS, "watch_gil(address, number): see the source."},
    {"install", install, METH_VARARGS, "install(address, size, numbers, wake=-1): see the source."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sender", NULL, -1, methods};

PyMODINIT_FUNC PyInit__sender(void) { return PyModule_Create(&module); }

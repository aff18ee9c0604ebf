/* Notes who sent a signal, in shared memory, the moment it arrives; then does what would have been done without it.

Python's own handlers do not see siginfo, and `sigwaitinfo` needs the signal blocked, which every program that user
code starts would inherit. The sender's command line is read here, inside the handler, because a `kill` is gone a
moment later. Only calls that are allowed in a signal handler are made.

Optional: without a compiler the report says "sender unknown", see local/sender.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#define LEVELS 6    /* the sender, its parent, and so on */
#define COMMAND 300 /* bytes of a command line */

/* As local/sender.py reads it. */
struct note {
    int64_t serial; /* raised last: then the rest is whole */
    int64_t number, pid, uid, code, length;
    char text[]; /* per level: pid, tab, command line, newline */
};

static struct note *page;
static int64_t room;
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

static int64_t parent_of(int64_t pid) {
    char stat[512];
    ssize_t got = slurp(pid, "/stat", stat, sizeof stat), at = got - 1;
    while (at > 0 && stat[at] != ')') at--; /* the name may hold anything */
    at += 4;                                /* ") S " */
    int64_t parent = 0;
    for (; at < got && stat[at] >= '0' && stat[at] <= '9'; at++) parent = parent * 10 + (stat[at] - '0');
    return parent;
}

static void note(int number, siginfo_t *info, void *context) {
    int saved = errno;
    page->number = number;
    page->pid = info->si_pid;
    page->uid = info->si_uid;
    page->code = info->si_code;
    size_t at = 0;
    int64_t pid = info->si_code > 0 ? 0 : info->si_pid; /* above 0 the kernel sent it, and there is no sender */
    for (int level = 0; level < LEVELS && pid > 0 && at + COMMAND + 32 < (size_t)room; level++) {
        at += put_number(page->text + at, pid);
        page->text[at++] = '\t';
        ssize_t got = slurp(pid, "/cmdline", page->text + at, COMMAND);
        for (ssize_t i = 0; i < got; i++, at++)
            if ((unsigned char)page->text[at] < ' ') page->text[at] = ' ';
        page->text[at++] = '\n';
        pid = parent_of(pid);
    }
    page->length = (int64_t)at;
    page->serial++;
    struct sigaction *old = &before[number];
    if (old->sa_flags & SA_SIGINFO)
        old->sa_sigaction(number, info, context);
    else if (old->sa_handler == SIG_DFL) {
        sigaction(number, old, NULL); /* what it always does, once this handler has returned */
        raise(number);
    } else if (old->sa_handler != SIG_IGN)
        old->sa_handler(number);
    errno = saved;
}

/* install(address, size, numbers): from now on, signals with these numbers are noted at that address first. */
static PyObject *install(PyObject *module, PyObject *args) {
    Py_ssize_t address, size;
    PyObject *numbers;
    if (!PyArg_ParseTuple(args, "nnO!", &address, &size, &PyTuple_Type, &numbers)) return NULL;
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

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, "install(address, size, numbers): see the source."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sender", NULL, -1, methods};

PyMODINIT_FUNC PyInit__sender(void) { return PyModule_Create(&module); }

/** Terminates a process, as a Spark executor does with its Python workers. */
public class Terminate {
    public static void main(String[] args) {
        ProcessHandle.of(Long.parseLong(args[0])).get().destroy();
    }
}

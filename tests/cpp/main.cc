// The start of every test program that has no main of its own.

extern "C" int runTestProgram(int argc, char** argv); // check.h

int main(int argc, char** argv) {
  return runTestProgram(argc, argv);
}
